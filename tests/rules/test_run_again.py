"""Layers without a rule run again in the backward pass: with what they read unchanged since, or with an error, and what
the second run sets on them does not stay."""

import functools
import random
import warnings

import numpy
import pytest
import torch
from distances import CHANGED, MODES, Distances, Model, inputs, loss_of, step, wrapped_with_plain
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dpfast.errors import UnsupportedModuleError


@pytest.fixture(params=MODES)
def wrap(request):
    torch.manual_seed(0)
    return functools.partial(wrapped_with_plain, MODES[request.param])


def test_an_attribute_set_for_the_forward_alone_is_refused(wrap):
    model = Model(Distances())
    wrapped = wrap(model)
    with model.m.scaled(3.0):
        loss = loss_of(wrapped, inputs())
    with pytest.raises(UnsupportedModuleError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("n", [1, 4])
def test_the_remedy(wrap, n):
    """It stays until backward()."""
    model = Model(Distances())
    wrapped = wrap(model)
    with model.m.scaled(3.0):
        step(wrapped, inputs(n))


def test_an_attribute_that_is_set_in_later_steps_alone(wrap):
    model = Model(Distances())
    wrapped = wrap(model)
    for _ in range(3):
        step(wrapped, inputs())
    with model.m.scaled(3.0):
        loss = loss_of(wrapped, inputs())
    with pytest.raises(UnsupportedModuleError, match=CHANGED):
        loss.backward()


def test_two_uses_with_other_numbers_are_refused(wrap):
    class Twice(Model):
        def forward(self, x):
            found = 0.0
            for self.m.scale in (1.0, 3.0):
                found = found + self.m(self.first(x))
            return found

    with pytest.raises(UnsupportedModuleError, match=CHANGED):
        loss_of(wrap(Twice(Distances())), inputs()).backward()


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


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("forward", [_buffer_in_place, _buffer_anew, _number, _count])
def test_a_state_that_each_forward_moves_on_is_refused(wrap, forward, n):
    with warnings.catch_warnings(), pytest.raises(UnsupportedModuleError, match=CHANGED):
        warnings.simplefilter("ignore")
        loss_of(wrap(Model(Distances(forward))), inputs(n)).backward()


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
        warnings.simplefilter("ignore")  # torch.func forbids it: by a loop
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
    with torch.autocast("cpu", enabled=autocast), model.m.scaled(5.0):
        model.m.then = lambda self, products: products * self.scale
        loss = loss_of(wrapped, x)
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


def test_two_numbers_are_kept_of_each_output():
    wrapped = MODES["one pass"](Model(Distances()))
    for _ in range(2):
        loss = loss_of(wrapped, inputs())
        node = loss.grad_fn
        while not hasattr(node, "record"):
            node = node.next_functions[0][0]
        assert sum(x.numel() for x in tree_leaves(vars(node.record.gave)) if isinstance(x, torch.Tensor)) == 2
        loss.backward()
