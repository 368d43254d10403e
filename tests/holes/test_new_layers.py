"""Layers that do not run in every forward, by a switch of the model's own or by random numbers, are looked at when they
run: none is taken on trust, and none is refused for having been out."""

import copy
import gc
import random
import weakref

import numpy
import pytest
import torch
from own_backwards import BatchMean
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")

D, C = 4, 0.3
SIZES = [(5, 3), (5, 5), (3, 5)]


class Block(nn.Module):
    def __init__(self, time_first=False):
        super().__init__()
        self.lin, self.norm, self.time_first = nn.Linear(D, D), nn.LayerNorm(D), time_first

    def forward(self, x):
        if self.time_first:
            return self.norm(self.lin(x.transpose(0, 1))).transpose(0, 1)
        return self.norm(self.lin(x))


class Switched(nn.Module):
    """``on``: which blocks run."""

    def __init__(self, *, time_first=False, mixing=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(time_first) for _ in range(3))
        self.head, self.on, self.mixing = nn.Linear(D, D), set(), mixing

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i in self.on:
                x = x + block(x + x.roll(1, 0) if self.mixing else x)
        return self.head(x)


def losses(model, x):
    return model(x).square().flatten(1).sum(1)


def clipping(model):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")


def check_step(wrapped, model, x):
    wrapped.zero_grad()
    losses(wrapped, x).sum().backward()
    exact = clipped_sum(loop_over_samples(model, lambda m, x: losses(m, x).sum(), x), C)
    for name, total in exact.items():
        assert relative_error(wrapped._module.get_parameter(name).grad, total) <= 1e-4, name


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("n, t", SIZES)
def test_a_layer_that_is_switched_on_later(n, t, time_first):
    model = Switched(time_first=time_first)
    wrapped = clipping(copy.deepcopy(model))
    for on in ({0}, {0}, {0, 1}, {0}, {2}, {0, 1, 2}, set(), {1, 2}, {0}, {0, 1, 2}):
        model.on = wrapped._module.on = on
        check_step(wrapped, model, torch.randn(n, t, D))


@pytest.mark.parametrize("passed", [2, 3])  # forwards: the second is looked at anyway, the fourth is not
@pytest.mark.parametrize("n, t", SIZES)
def test_samples_that_meet_in_a_layer_that_is_switched_on_later(n, t, passed):
    wrapped = clipping(Switched(mixing=True))
    for _ in range(passed):
        losses(wrapped, torch.randn(n, t, D)).sum().backward()
        wrapped.zero_grad()
    wrapped._module.on = {1}
    for _ in range(2):
        with pytest.raises(UnsupportedModuleError, match=r"samples meet in blocks\.1\.lin"):
            losses(wrapped, torch.randn(n, t, D)).sum().backward()
        assert all(p.grad is None for p in wrapped.parameters())
    wrapped._module.on = set()


def test_what_is_looked_at_once_is_not_looked_at_again(monkeypatch):
    looks, learned = [], dpfast.looks.called.learned
    monkeypatch.setattr(dpfast.looks.called, "learned", lambda *args: looks.append(1) or learned(*args))
    wrapped = clipping(Switched())
    for on in ({0}, {0, 1}, {0}, {0, 1}, {1}):
        wrapped._module.on = on
        losses(wrapped, torch.randn(5, 3, D)).sum().backward()
        wrapped.zero_grad()
    assert len(looks) == 2


def test_the_layer_named_in_a_layout_is_not_looked_at(monkeypatch):
    model = Switched(time_first=True)
    names = [f"blocks.1.{name}" for name in ("lin", "norm")]
    wrapped = dpfast.GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), max_grad_norm=C, loss_reduction="sum", layout=dict.fromkeys(names, 1)
    )
    for on in ({0}, {0, 1}):
        model.on = wrapped._module.on = on
        check_step(wrapped, model, torch.randn(5, 5, D))


def _of_torch():
    return torch.rand([])


@pytest.mark.parametrize("draw", [_of_torch, random.random, numpy.random.random])
@pytest.mark.parametrize("dropped", [0.2, 0.6])
def test_layer_drop(draw, dropped):
    """As encoders of speech drop layers, a batch at a time (Fan et al. 2020, "LayerDrop")."""

    class Dropping(Switched):
        def forward(self, x):
            for block in self.blocks:
                keeps = not (self.training and draw() < dropped)
                if keeps:
                    x = x + block(x)
            return self.head(x)

    random.seed(0)  # a look draws a few times: once in 150 a layer is out in all of them
    numpy.random.seed(0)
    model = Dropping(time_first=True)
    wrapped, ran = clipping(copy.deepcopy(model)), set()
    for block in wrapped._module.blocks:
        block.register_forward_hook(lambda block, *_: ran.add(block))
    for step in range(20):
        x = torch.randn(5, 5, D)
        wrapped.zero_grad()
        ran.clear()
        losses(wrapped, x).sum().backward()
        on = {i for i, block in enumerate(wrapped._module.blocks) if block in ran}
        plain = Switched(time_first=True)
        plain.load_state_dict(wrapped._module.state_dict())
        plain.on = on
        exact = clipped_sum(loop_over_samples(plain, lambda m, x: losses(m, x).sum(), x), C)
        for name, total in exact.items():
            assert relative_error(wrapped._module.get_parameter(name).grad, total) <= 1e-4, (step, name)


def test_one_look_shows_layers_that_are_dropped(monkeypatch):
    """With other random numbers, until all have run."""

    class Dropping(Switched):
        def forward(self, x):
            for block in self.blocks:
                x = x + block(x) if torch.rand([]) < 0.5 else x
            return self.head(x)

    looks, learned = [], dpfast.looks.called.learned
    monkeypatch.setattr(dpfast.looks.called, "learned", lambda *args: looks.append(1) or learned(*args))
    torch.manual_seed(0)
    wrapped = clipping(Dropping())
    for _ in range(6):
        losses(wrapped, torch.randn(5, 3, D)).sum().backward()
        wrapped.zero_grad()
    assert len(looks) == 1


class InPlace(Switched):
    def forward(self, x):
        return self.head(self.blocks[0](x) if self.on else x)


class Counting(Switched):
    """Runs a block in every third forward, or so."""

    passed = 0

    def __init__(self, every, **options):
        super().__init__(**options)
        self.every = every

    def forward(self, x):
        self.passed += 1
        if self.passed % self.every:
            return self.head(x)
        return self.head(self.blocks[0](x + x.roll(1, 0) if self.mixing else x))


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_layer_that_runs_now_and_then(every):
    """By a count that is another already when it has run: what comes two or three passes later is looked at."""
    model = Counting(every)
    wrapped, plain = clipping(copy.deepcopy(model)), InPlace()
    plain.load_state_dict(model.state_dict())
    for step in range(1, 10):
        plain.on = set() if step % every else {0}
        check_step(wrapped, plain, torch.randn(5, 3, D))
        assert wrapped._module.passed == step


@pytest.mark.parametrize("every", [2, 3, 4])
def test_samples_that_meet_in_a_layer_that_runs_now_and_then(every):
    wrapped = clipping(Counting(every, mixing=True))
    with pytest.raises(UnsupportedModuleError, match=r"samples meet in blocks\.0\.lin"):
        for _ in range(every):
            losses(wrapped, torch.randn(5, 3, D)).sum().backward()
            wrapped.zero_grad()
    assert wrapped._module.passed == every


def test_what_no_trial_runs_is_taken_on_trust_with_a_warning(monkeypatch):
    looks, learned = [], dpfast.looks.called.learned
    monkeypatch.setattr(dpfast.looks.called, "learned", lambda *args: looks.append(1) or learned(*args))
    model = Counting(6)
    wrapped, plain = clipping(copy.deepcopy(model)), InPlace()
    plain.load_state_dict(model.state_dict())
    replaced = []
    for step in range(18):
        x = torch.randn(5, 3, D)
        plain.on = {0} if step % 6 == 5 else set()
        if step == 5:
            with pytest.warns(DpfastWarning, match=r"blocks\.0\.lin .*blocks\.0\.norm .* taken on trust"):
                check_step(wrapped, plain, x)
        else:
            check_step(wrapped, plain, x)
        replaced.append(len(looks))
    assert replaced[4:] == [1] + [5] * 13  # no other look comes of it


def test_a_layer_that_a_hook_runs_is_taken_on_trust_with_a_warning():
    model = Switched()
    model.adapter = nn.Linear(D, D)
    wrapped = clipping(model)
    model.head.register_forward_hook(lambda _, args, output: output + model.adapter(args[0]))
    for _ in range(2):  # where warnings are errors, as they are here, none is accepted the second time
        with pytest.raises(DpfastWarning, match=r"adapter .* taken on trust"):
            wrapped(torch.randn(5, 3, D))
    with pytest.warns(DpfastWarning, match=r"adapter .* taken on trust"):
        losses(wrapped, torch.randn(5, 3, D)).sum().backward()
    assert model.adapter.weight.grad.any()
    losses(wrapped, torch.randn(5, 3, D)).sum().backward()


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.rnn, self.head = cell(D, D, batch_first=True), nn.Linear(D, D)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        states = self.rnn(packed)[1]
        return self.head((states[0] if isinstance(states, tuple) else states)[-1])


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_packed_sequences_that_are_sorted(cell):
    model, lengths = Recurrent(cell), [5, 4, 3, 3, 1]
    wrapped = clipping(copy.deepcopy(model))
    for _ in range(3):
        x = torch.randn(5, 5, D)
        wrapped.zero_grad()
        wrapped(x, torch.tensor(lengths)).square().sum().backward()
        exact = clipped_sum(
            loop_over_samples(model, lambda m, x, n: m(x, n).square().sum(), x, torch.tensor(lengths)), C
        )
        for name, total in exact.items():
            assert relative_error(wrapped._module.get_parameter(name).grad, total) <= 1e-4, name


class InQuarters(Switched):
    """Samples meet in quarters of the batch: of three, none."""

    def forward(self, x):
        if self.on:
            x = x + self.blocks[0](torch.cat([part - part.mean(0, keepdim=True) for part in x.chunk(4)]))
        return self.head(x)


def test_samples_that_meet_in_parts_of_the_batch():
    wrapped = clipping(InQuarters())
    for on in (set(), set(), set(), {0}):
        wrapped.zero_grad()
        wrapped._module.on = on
        if not on:
            losses(wrapped, torch.randn(8, 3, D)).sum().backward()
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples|not its own"):
        losses(wrapped, torch.randn(8, 3, D)).sum().backward()


class BehindTheOthers(Switched):
    def forward(self, x):
        y = self.head(self.blocks[1](x))
        return BatchMean.apply(y) + self.blocks[0](x) if self.on else y


def test_samples_that_meet_behind_a_layer_that_is_known():
    """In the very step in which the new one runs."""
    wrapped = clipping(BehindTheOthers())
    for _ in range(3):
        losses(wrapped, torch.randn(8, 3, D)).sum().backward()
        wrapped.zero_grad()
    wrapped._module.on = {0}
    for _ in range(2):
        with pytest.raises(UnsupportedModuleError, match="changes with a sample that is not its own"):
            losses(wrapped, torch.randn(8, 3, D)).sum().backward()
        assert all(p.grad is None for p in wrapped.parameters())


class Failing(Switched):
    def forward(self, x):
        output = super().forward(x)
        if self.mixing:
            raise ValueError("midway")
        return output


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_of_a_forward(fails):
    model = Failing()
    wrapped = clipping(model)
    for on in ({0}, {0, 1}):
        model.on, model.mixing, x = on, False, torch.randn(5, 3, D)
        losses(wrapped, x).sum().backward()
    model.on, model.mixing = {2}, fails
    gone = weakref.ref(x := torch.randn(5, 3, D))
    if fails:
        with pytest.raises(ValueError, match="midway"):
            wrapped(x)
    else:
        wrapped(x)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_runs_for_the_first_time_in_a_checkpoint(use_reentrant):
    class Checkpointed(Switched):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model = Checkpointed()
    wrapped = clipping(copy.deepcopy(model))
    for on in ({0}, {0, 1}, {1, 2}, {0}):
        model.on = wrapped._module.on = on
        check_step(wrapped, model, torch.randn(5, 3, D, requires_grad=True))


def test_random_numbers_are_those_of_the_model_alone():
    """A look draws none of them."""

    class Drawing(Switched):
        def forward(self, x):
            self.drawn.append((float(torch.rand([])), random.random(), float(numpy.random.random())))
            return super().forward(x)

    drawn = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = Drawing()
        model.drawn = []
        wrapped = clipping(model) if wraps else model
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        for on in ({0}, {1}, {0, 2}):
            model.on = on
            losses(wrapped, torch.ones(5, 3, D)).sum().backward()
        drawn.append(model.drawn)
    assert drawn[0] == drawn[1]
