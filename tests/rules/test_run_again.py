"""Layers without a rule run again in the backward pass: with what they read as their forward found it, or with an
error, and what the second run sets on them does not stay."""

import copy
import functools
import random
import types
import warnings

import numpy
import pytest
import torch
from distances import CHANGED, MODES, C, Distances, Model, inputs, loss_of, step, wrapped_with_plain
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.taps.gave import Before
from dpfast.testing import clipped_sum, relative_error


@pytest.fixture(params=MODES)
def wrap(request):
    torch.manual_seed(0)
    return functools.partial(wrapped_with_plain, MODES[request.param])


def exact(model, x, loss=loss_of):
    """Gradients by sample, each of a copy: a forward may move the model's state on."""
    rows = []
    for one in x.split(1):
        own = copy.deepcopy(model)
        loss(own, one).backward()
        rows.append({name: p.grad for name, p in own.named_parameters()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def agrees(wrapped, expected):
    per_sample = type(wrapped) is dpfast.GradSampleModule
    expected = expected if per_sample else clipped_sum(expected, C)
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad_sample if per_sample else p.grad, expected[name]) < 1e-4, name


def test_an_attribute_set_for_the_forward_alone(wrap):
    """The run again finds the number that the forward found."""
    model = Model(Distances())
    wrapped = wrap(model)
    for scale in (3.0, 1.0, 3.0):
        x = inputs()
        wrapped.zero_grad()
        with model.m.scaled(scale):
            loss = loss_of(wrapped, x)
        loss.backward()
        with wrapped.plain.m.scaled(scale):
            agrees(wrapped, exact(wrapped.plain, x))


class Doubled:
    factor = 1.0


@pytest.mark.parametrize("how", ["tensor", "object", "function", "number in a list"])
def test_what_else_is_set_for_the_forward_alone_is_refused(wrap, how):
    """It was not kept as it was: it may be large."""
    reads = {
        "tensor": lambda self, distances: distances * self.factor,
        "object": lambda self, distances: distances * self.object.factor,
        "function": lambda self, distances: distances,
        "number in a list": lambda self, distances: distances * self.listed[0],
    }
    model = Model(Distances(reads[how]))
    model.m.factor, model.m.object, model.m.listed = torch.ones(()), Doubled(), [1.0]
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())
    loss = loss_of(wrapped, inputs())
    model.m.factor, model.m.object.factor, model.m.listed[0] = torch.tensor(2.0), 2.0, 2.0
    if how == "function":
        model.m.then = lambda self, distances: distances * 2.0
    with pytest.raises(UnsupportedModuleError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("n", [1, 4])
def test_the_remedy(wrap, n):
    """It stays until backward()."""
    model = Model(Distances())
    wrapped = wrap(model)
    with model.m.scaled(3.0):
        step(wrapped, inputs(n))


def test_two_uses_with_other_numbers(wrap):
    class Twice(Model):
        def forward(self, x):
            found = 0.0
            for self.m.scale in (1.0, 3.0):
                found = found + self.m(self.first(x))
            return found

    model, x = Twice(Distances()), inputs()
    wrapped = wrap(model)
    loss_of(wrapped, x).backward()
    agrees(wrapped, exact(wrapped.plain, x))


def _buffer_in_place(self, distances):
    self.tau.mul_(0.9)
    return distances / self.tau


def _buffer_anew(self, distances):
    self.tau = self.tau * 0.9
    return distances / self.tau


def _number(self, distances):
    self.scale *= 0.9
    return distances * self.scale


def _count(self, distances):
    self.count += 1
    return distances / (1.0 + 0.1 * self.count)


def _buffer_now_and_then(self, distances):
    self.count += 1
    if self.count % 2 == 0:
        self.tau.mul_(0.5)
    return distances / self.tau


def _number_that_it_makes(self, distances):
    self.phase = 1.0 - getattr(self, "phase", 1.0)
    return distances * (1.0 + self.phase)


def _buffer_of_two_names(self, distances):
    self.tau.mul_(0.9)
    return distances / self.other


def _tensor(self, distances):
    self.factor = getattr(self, "factor", torch.ones(())) * 0.9
    return distances * self.factor


MOVES = [
    _buffer_in_place,
    _buffer_anew,
    _buffer_now_and_then,
    _buffer_of_two_names,
    _number,
    _count,
    _number_that_it_makes,
]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("forward", MOVES)
def test_a_state_that_each_forward_moves_on(wrap, forward, n):
    """Which was refused."""
    model = Model(Distances(forward))
    model.m.register_buffer("other", model.m.tau)
    wrapped = wrap(model)
    for number in range(1, 4):
        x = inputs(n)
        expected = exact(wrapped.plain, x)
        wrapped.zero_grad()
        loss_of(wrapped, x).backward()
        agrees(wrapped, expected)
        wrapped.plain(x)  # moves on, too
        assert (model.m.scale, model.m.count) == (wrapped.plain.m.scale, wrapped.plain.m.count)
        assert torch.equal(model.m.tau, wrapped.plain.m.tau), number


def test_a_tensor_that_each_forward_moves_on_is_refused(wrap):
    with pytest.raises(UnsupportedModuleError, match=CHANGED):
        loss_of(wrap(Model(Distances(_tensor))), inputs()).backward()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_object_that_comes_back_with_every_second_run_is_refused(wrap, dtype, n):
    """A third run gives what the first gave, and its agreement is no evidence."""

    class Alternating(Distances):
        def forward(self, x):
            self.state.phase = 1 - self.state.phase
            return torch.cdist(x.float(), self.rows.float()).to(x.dtype) * (1 + self.state.phase)

    model = Model(Alternating()).to(dtype)
    model.m.state = types.SimpleNamespace(phase=0)
    with pytest.raises(UnsupportedModuleError, match="gave another output"):
        loss_of(wrap(model), inputs(n).to(dtype)).backward()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_spectral_norms_that_have_not_converged(wrap, kind, n):
    """Each pass makes one power iteration, and the run again none: gradients were off by a thousandth or more."""
    layer = nn.Linear(6, 8) if kind == "Linear" else nn.Conv2d(2, 4, 3)
    model = nn.Sequential(spectral_norm(layer), nn.Tanh())
    wrapped = wrap(model)
    for _ in range(3):
        x = torch.randn(n, *((6,) if kind == "Linear" else (2, 5, 5)))
        expected = exact(wrapped.plain, x)
        wrapped.zero_grad()
        loss_of(wrapped, x).backward()
        agrees(wrapped, expected)
        wrapped.plain(x)
        for one, other in zip(model.buffers(), wrapped.plain.buffers(), strict=True):
            assert torch.equal(one, other)


def test_large_buffers_that_are_only_read_are_not_copied(wrap):
    model = Model(Distances(lambda self, distances: distances * self.tau))
    model.m.register_buffer("table", torch.ones(5000))
    wrapped, copies = wrap(model), []
    for _ in range(3):
        loss = loss_of(wrapped, inputs())
        copies.append(_record(loss).gave.before.buffers)
        loss.backward()
    assert copies == [{}, {}, {}]
    assert Before(model.m).buffers.keys() == {"tau"}


def test_a_number_that_is_set_between_steps_may_change(wrap):
    model = Model(Distances())
    wrapped = wrap(model)
    for scale in (1.0, 0.5, 0.25, 0.25):
        model.m.scale = scale
        step(wrapped, inputs())


def _counts(self, distances):
    self.count += 1
    self.last = distances.detach()
    self.all.append(self.last)
    self.new = self.count
    return distances


def test_attributes_are_as_the_forward_left_them(wrap):
    model = Model(Distances(_counts))
    wrapped = wrap(model)
    for number in range(1, 4):
        x = inputs()
        step(wrapped, x)
        # Looks at the model run copies of it.
        assert model.m.count == model.m.new == len(model.m.all) == number
        distances = torch.cdist(model.first(x), model.m.rows)
        assert torch.allclose(model.m.last, distances) and torch.allclose(model.m.all[-1], distances)


def _counts_in_a_buffer(self, distances):
    self.tau += 1.0
    return distances


def test_a_buffer_that_nobody_reads_is_written_to_once(wrap):
    model = Model(Distances(_counts_in_a_buffer))
    wrapped = wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each run has one of its own
        for number in range(1, 4):
            step(wrapped, inputs())
            assert model.m.tau.item() == 1.0 + number


def test_hooks_run_once_and_what_they_see_stays(wrap):
    model, seen = Model(Distances()), []
    model.m.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.m.register_forward_hook(lambda _, args, output: seen.append(output))
    wrapped = wrap(model)
    for number in range(1, 4):
        loss_of(wrapped, inputs()).backward()
        assert len(seen) == 2 * number
        assert all(x.isfinite().all() for x in seen)


def test_hooks_that_change_inputs_and_outputs_count_once(wrap):
    model = Model(Distances())
    model.m.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    model.m.register_forward_hook(lambda _, args, output: output * 3.0)
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())


def test_what_follows_may_change_the_output_in_place(wrap):
    model = Model(Distances(), after=lambda x: x.mul_(2.0).add_(1.0))
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(wrap, reentrant):
    class Checkpointed(Model):
        def forward(self, x):
            return checkpoint(self.m, self.first(x), use_reentrant=reentrant)

    model = Checkpointed(Distances())
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())


def test_dropout_that_drops_nothing(wrap):
    model = Model(Distances(lambda self, distances: nn.functional.dropout(distances, 0.5, self.training)))
    model.eval()
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())


@pytest.mark.parametrize("autocast", [False, True])
def test_rounding_to_16_bits_is_no_change(wrap, autocast):
    """The second run is in fp32."""

    def forward(self, distances):  # a small difference of numbers that were rounded
        return torch.linalg.vecdot(self.rows, self.rows) + distances @ torch.ones(3, 3, dtype=distances.dtype) - 9.0

    class Products(Distances):
        def forward(self, x):
            return self.then(self, x @ self.rows.T)

    model = Model(Products(forward))
    x = inputs()
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    wrapped = wrap(model)
    for scale in (1.0, 1.0, 2.0):  # a number is another: compared again
        model.m.scale = scale
        with torch.autocast("cpu", enabled=autocast):
            loss = loss_of(wrapped, x)
        loss.backward()
    with torch.autocast("cpu", enabled=autocast):
        loss = loss_of(wrapped, x)
    model.m.then = lambda self, products: products * self.scale
    with pytest.raises(UnsupportedModuleError, match="gave another output"):
        loss.backward()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("draw", [random.random, numpy.random.random])
def test_random_numbers_that_torch_does_not_draw_are_refused(wrap, draw, n):
    """They come out the same now and then: the first step alone would not tell."""
    wrapped = wrap(Model(Distances(lambda self, distances: distances * (2.0 if draw() < 0.0 else 1.0))))
    with pytest.raises(UnsupportedModuleError, match="draws random numbers"):
        loss_of(wrapped, inputs(n)).backward()


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_masked_scores_are_compared_without_what_is_masked(wrap, value):
    model = Model(
        Distances(lambda self, distances: distances.masked_fill(distances < distances.mean(1, True), value) * self.tau),
        after=lambda x: x.masked_fill(x < 0.0, 0.0),
    )
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())
    loss = loss_of(wrapped, inputs())
    model.m.tau.mul_(1.1)
    with pytest.raises(UnsupportedModuleError, match=CHANGED):
        loss.backward()


def test_a_loss_of_two_forwards_of_a_layer_that_counts(wrap):
    model = Model(Distances(_counts))
    wrapped = wrap(model)
    for number in range(1, 4):
        (loss_of(wrapped, inputs()) + loss_of(wrapped, inputs())).backward()
        assert model.m.count == 2 * number


def _record(loss):
    node = loss.grad_fn
    while not hasattr(node, "record"):
        node = node.next_functions[0][0]
    return node.record


def test_two_numbers_are_kept_of_each_output():
    wrapped = MODES["one pass"](Model(Distances()))
    for _ in range(2):
        loss = loss_of(wrapped, inputs())
        assert sum(x.numel() for x in tree_leaves(vars(_record(loss).gave)) if isinstance(x, torch.Tensor)) == 2
        loss.backward()
