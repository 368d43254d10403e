"""Where samples are is learned: time-first layers and tables without samples are right, mixtures are refused."""

import copy
import functools
import pickle
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error
from dpfast.trials.fake_run import ShapeTap

T, D, C = 5, 6, 0.3


class Model(nn.Module):
    """What its subclasses compute between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.lin, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x, *more):
        return self.head(torch.tanh(self.between(torch.tanh(self.first(x)), *more)))


class TimeFirst(Model):
    def between(self, x):
        return self.lin(x.transpose(0, 1)).transpose(0, 1)


class TimeFirstInCheckpoint(TimeFirst):
    reentrant: bool | None = False

    def between(self, x):
        if self.reentrant is None:
            return super().between(x)
        return checkpoint(super().between, x, use_reentrant=self.reentrant)


class TimeFirstInReentrantCheckpoint(TimeFirstInCheckpoint):
    reentrant = True


class BothWays(Model):
    """One layer at ranks that differ, samples in dimensions that differ."""

    def between(self, x):
        return self.lin(x.transpose(0, 1)).transpose(0, 1) + self.lin(x.mean(1)).unsqueeze(1)


class TimeFirstEncoder(Model):
    def __init__(self):
        super().__init__()
        self.lin = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0)

    def between(self, x):
        return self.lin(x.transpose(0, 1)).transpose(0, 1)


class TimeFirstRecurrent(TimeFirst):
    def __init__(self):
        super().__init__()
        self.lin = nn.GRU(D, D)

    def between(self, x):
        return self.lin(x.transpose(0, 1))[0].transpose(0, 1)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, x):
        return x * self.gain


class TimeFirstWithoutRule(TimeFirst):
    def __init__(self):
        super().__init__()
        self.lin = Gain()


class AsksForValues(TimeFirst):
    def between(self, x):
        return super().between(x) if (x < 100.0).all() else x


class WithMask(TimeFirst):
    """A (T, T) mask, which looks like samples where T = N."""

    def between(self, x, mask):
        return super().between(mask @ x)


class Table(Model):
    """Positions (T,), which the model broadcasts."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Embedding(T, D)

    def between(self, x):
        return x + self.lin(torch.arange(T).flip(0))


class RelativeTable(Model):
    """A table (T, T) of relative positions."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Embedding(2 * T, 1)

    def between(self, x):
        places = torch.arange(T)
        return self.lin(places[:, None] - places + T).squeeze(2).softmax(1) @ x


class OnRelativePositions(Model):
    """A Linear on (2T - 1, D)."""

    def between(self, x):
        return x + self.lin(torch.linspace(-1.0, 2.0, 2 * T - 1).to(x).unsqueeze(1).expand(-1, D)).mean(0)


RIGHT = {
    TimeFirst: lambda n: (),
    TimeFirstInCheckpoint: lambda n: (),
    TimeFirstInReentrantCheckpoint: lambda n: (),
    BothWays: lambda n: (),
    TimeFirstEncoder: lambda n: (),
    TimeFirstRecurrent: lambda n: (),
    TimeFirstWithoutRule: lambda n: (),
    Table: lambda n: (),
    RelativeTable: lambda n: (),
    OnRelativePositions: lambda n: (),
    AsksForValues: lambda n: (),
    WithMask: lambda n: (torch.rand(T, T),),
}
SIZES = [1, 3, 2 * T - 1, T, D, 2]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("make", RIGHT, ids=lambda m: m.__name__)
@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
def test_samples_in_another_dimension(make, n, mode):
    torch.manual_seed(0)
    model, x, more = make(), torch.randn(n, T, D), RIGHT[make](n)
    plain = copy.deepcopy(model)
    plain.reentrant = None

    def losses(m, x):
        return torch.sin(3.0 * m(x, *(y.to(x.dtype) for y in more))).flatten(1).sum(1)

    def known(wrapped):  # a batch of another size tells that the mask is not of samples
        if more:
            wrapped(torch.randn(n + 1, T, D), *more)
        return wrapped

    exact = loop_over_samples(plain, lambda m, x: losses(m, x).sum(), x)
    if mode == "grad_sample":
        losses(known(dpfast.GradSampleModule(model, loss_reduction="sum")), x).sum().backward()
        for name, p in model.named_parameters():
            assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
        return
    wrapped = dpfast.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=C, passes=1 + (mode == "two passes")
    )
    values = losses(known(wrapped), x)
    values.sum().backward(retain_graph=True)
    if mode == "two passes":
        wrapped.disable_hooks()
        (wrapped.get_clipping_coef() * values).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name


# --- no samples, or not in one dimension ---


class OfTheirMean(Model):
    """A Linear on the mean of the samples."""

    def between(self, x):
        return x + self.lin(x.mean(0))


class Pairs(Model):
    """Similarities (N, N), scaled."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(1, 1)

    def between(self, x):
        y = x.mean(1)
        return x + self.lin((y @ y.t()).unsqueeze(2)).mean(1).unsqueeze(1)


class RecurrentOverSamples(Model):
    """A GRU that takes the samples for its time steps."""

    def __init__(self):
        super().__init__()
        self.lin = nn.GRU(D, D)

    def between(self, x):
        return self.lin(x)[0]


REFUSED = {
    OfTheirMean: "samples meet in",
    Pairs: "samples meet in",
    RecurrentOverSamples: "samples meet in",
}


@pytest.mark.parametrize("n", [3, *SIZES[2:]])
@pytest.mark.parametrize("make", REFUSED, ids=lambda m: m.__name__)
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_no_samples_is_an_error_that_names_the_layer(make, n, wrapper):
    model = make()
    mixes = REFUSED[make] == "samples meet in"
    match = r"samples meet in (lin|head) \(\w+\)" if mixes else rf"lin \(\w+\):? {REFUSED[make]}"
    with pytest.raises(UnsupportedModuleError if mixes else InputError, match=match):
        wrapper(model)(torch.randn(n, T, D)).sum().backward()


@pytest.mark.parametrize("make", REFUSED, ids=lambda m: m.__name__)
def test_frozen_it_does_no_harm(make):
    model = make()
    model.lin.requires_grad_(False)
    if make in (Pairs, RecurrentOverSamples, OfTheirMean):
        return  # they mix samples all the same
    x = torch.randn(T, T, D)
    exact = loop_over_samples(model, lambda m, x: m(x).sin().sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    wrapped(x).sin().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


# --- once, and without a trace ---


@pytest.fixture
def runs(monkeypatch):
    """How often a layer has run on fake tensors."""
    count = []
    run = ShapeTap.run
    monkeypatch.setattr(ShapeTap, "run", lambda self, *args: count.append(self.layer) or run(self, *args))
    return count


def test_other_sizes_are_not_looked_at_again(runs):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(TimeFirst())
    for n, t in [(3, 4), (5, 4), (0, 4), (7, 2), (1, 9)]:
        wrapped(torch.randn(n, t, D)).sum().backward()
        assert len(runs) == 2 * 3
    wrapped.eval()
    wrapped(torch.randn(3, 4, D)).sum().backward()
    assert len(runs) == 4 * 3


def test_a_mask_taken_for_samples_at_first():
    """(T, T) with T = N; the next batch is of another size, and a checkpoint repeats the forward."""

    class Masked(TimeFirstInCheckpoint):
        def between(self, x, mask):
            return super().between(mask @ x)

    torch.manual_seed(0)
    model, mask, x = Masked(), torch.rand(T, T), torch.randn(3, T, D)
    plain = copy.deepcopy(model)
    plain.reentrant = None
    exact = loop_over_samples(plain, lambda m, x: m(x, mask.to(x.dtype)).square().sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        wrapped(torch.randn(T, T, D), mask).square().sum().backward()
    wrapped(x, mask).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    wrapped(torch.randn(T, T, D), mask).square().sum().backward()


def test_nothing_is_left_behind():
    class Noisy(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop, self.kept = nn.Dropout(0.5), None

        def between(self, x):
            self.calls += 1
            self.kept = self.drop(x)
            self.chance = random.random()
            return self.kept

    model, seen = Noisy(), []
    model.lin.requires_grad_(False)
    model.first.register_forward_hook(lambda m, args, out: seen.append(out))
    wrapped = dpfast.GradSampleModule(model)
    torch.manual_seed(1)
    random.seed(1)
    state = torch.get_rng_state(), random.getstate()
    wrapped._tapped.probe.look(((torch.randn(0, T, D),), {}), [torch.randn(0, T, D)], 0, b"")
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert not seen and model.kept is None and float(model.calls) == 0.0
    assert not any(isinstance(x, FakeTensor) for x in (*model.parameters(), *model.buffers()))
    assert wrapped._tapped._taps[0].places == {3: 0}


def test_copies_and_pickles_learn_anew(runs):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(TimeFirst())
    x = torch.randn(T, T, D)
    wrapped(x).square().sum().backward()
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        other.zero_grad()
        other(x).square().sum().backward()
        assert torch.equal(other.get_norm_sample(), wrapped.get_norm_sample())
    assert len(runs) == 6 * 3


def test_a_layer_that_is_unfrozen_later():
    torch.manual_seed(0)
    model, x = TimeFirst(), torch.randn(T, T, D)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    model.lin.requires_grad_(False)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    model.lin.requires_grad_(True)
    wrapped.zero_grad()
    wrapped(x).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


# --- where nothing can be learned ---


class Unknown(Model):
    """Runs on a batch of one size alone."""

    size = T

    def between(self, x):
        if len(x) != self.size:
            raise ValueError("a batch of another size")
        return self.lin(x)


def _of_any_size(model):
    plain = copy.deepcopy(model)
    plain.size = 1
    return plain


def test_where_another_dimension_is_as_long_an_error_names_the_layer_and_the_line_to_write():
    x = torch.randn(T, T, D)
    with pytest.raises(InputError, match=r"first \(Linear\): .* \(5, 5, 6\)\? .*layout=\{'first': 0\}"):
        dpfast.GradSampleModuleFastGradientClipping(Unknown())(x)
    model = Unknown()
    exact = loop_over_samples(_of_any_size(model), lambda m, x: m(x).square().sum(), x)
    given = dict.fromkeys(("first", "lin", "head"), 0)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", layout=given)
    wrapped(x).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_where_no_other_dimension_is_as_long_there_is_nothing_to_ask():
    model = Unknown()
    model.size = 3
    dpfast.GradSampleModuleFastGradientClipping(model)(torch.randn(3, T, D)).sum().backward()


@functools.lru_cache
def remembered(t):
    return torch.arange(float(t)).unsqueeze(-1)


class Remembers(Model):
    def between(self, x):
        return self.lin(x) + remembered(x.shape[1])


def test_what_functions_remember_is_no_fake_tensor():
    model = dpfast.GradSampleModule(Remembers())
    assert type(model(torch.randn(3, T, D))) is torch.Tensor
    assert type(remembered(T)) is torch.Tensor
