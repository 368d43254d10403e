"""Samples that meet between two forward passes, where the caller makes an input of what an earlier pass gave."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

D, C = 4, 0.3

MODES = {
    "grad_sample": lambda m: dpfast.GradSampleModule(m, loss_reduction="sum"),
    "one pass": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, loss_reduction="sum"),
    "two passes": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, passes=2),
}


class TwoWays(nn.Module):
    """An encoder and a head, each a call."""

    def __init__(self, features=D):
        super().__init__()
        self.encoder, self.head = nn.Linear(D, D), nn.Linear(features, 3)
        self.scale, self.beside = nn.Parameter(torch.randn(D)), None

    def forward(self, x, encode=False, context=None):
        if encode:
            return (self.encoder(x) * self.scale).tanh()
        x = x if context is None else x * context["by"]
        return self.head(x if self.beside is None else x * self.beside)


class Step(nn.Module):
    """A recurrence over which the caller has the loop."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(D, D), nn.Linear(D, 3)

    def forward(self, x, state):
        state = self.cell(x, state)
        return self.head(state), state


def called_twice(between):
    return lambda m, x: m(between(m(x, encode=True)))


def with_context(context):
    def run(m, x):
        h = m(x, encode=True)
        return m(h, context={"by": context(h)})

    return run


def by_the_way(context):
    """Not as an argument."""

    def run(m, x):
        h = m(x, encode=True)
        getattr(m, "_module", m).beside = context(h)
        try:
            return m(h)
        finally:
            getattr(m, "_module", m).beside = None

    return run


def unrolled(between):
    def run(m, x):
        state, given = torch.zeros_like(x), []
        for _ in range(3):
            out, state = m(x, state)
            state = between(state)
            given.append(out)
        return torch.stack(given, 1).mean(1)

    return run


class Keys(nn.Module):
    """Looks at rows of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(D, D)

    def forward(self, x, keys=None):
        h = self.encoder(x).tanh()
        if keys is None:
            return h
        return h + ((keys @ h[:, :, None]).softmax(1) * keys).sum(1)


MEET = {
    "mixup": (TwoWays, called_twice(lambda h: 0.6 * h + 0.4 * h.flip(0))),
    "other order": (TwoWays, called_twice(lambda h: h.flip(0))),
    "two in each other's place": (TwoWays, called_twice(lambda h: h[[1, 0, *range(2, len(h))]])),
    "batch norm": (TwoWays, called_twice(lambda h: F.batch_norm(h, None, None, training=True))),
    "centred": (TwoWays, called_twice(lambda h: h - h.mean(0))),
    "a small share": (TwoWays, called_twice(lambda h: h + 1e-6 * h.roll(1, 0))),
    "beside data": (lambda: TwoWays(2 * D), called_twice(lambda h: torch.cat([torch.ones_like(h), h.flip(0)], -1))),
    "with rolled negatives": (lambda: TwoWays(2 * D), called_twice(lambda h: torch.cat([h, h.roll(1, 0)], -1))),
    "all pairs": (lambda: TwoWays(), called_twice(lambda h: (h[:, None] * h[None]).flatten(0, 1))),
    "all for each": (Keys, lambda m, x: m(x, keys=m(x)[None].expand(len(x), -1, -1))),
    "one's rows for all": (TwoWays, called_twice(lambda h: h[:1].expand_as(h))),
    "a context of all": (TwoWays, with_context(lambda h: h.mean(0))),
    "one sample's": (TwoWays, with_context(lambda h: h[0])),
    "one number": (TwoWays, with_context(lambda h: h.norm())),
    "an attribute": (TwoWays, by_the_way(lambda h: h.mean(0))),
    "a state that is centred": (Step, unrolled(lambda h: h - h.mean(0))),
    "a state that is another's": (Step, unrolled(lambda h: h.roll(1, 0))),
}
APART = {
    "as it is": (TwoWays, called_twice(lambda h: h)),
    "beside data": (lambda: TwoWays(2 * D), called_twice(lambda h: torch.cat([torch.ones_like(h), h], -1))),
    "row by row": (TwoWays, called_twice(lambda h: F.normalize(h.exp() - h.mean(1, keepdim=True), dim=-1))),
    "a context": (TwoWays, with_context(lambda h: h.mean(1, keepdim=True))),
    "a context without samples": (TwoWays, with_context(lambda h: torch.ones(D).requires_grad_().exp())),
    "detached": (TwoWays, with_context(lambda h: h.detach().square())),
    "a state": (Step, unrolled(lambda h: 0.5 * h)),
    "a checkpoint": (TwoWays, called_twice(lambda h: checkpoint(torch.sin, h, use_reentrant=False))),
}


def loss(out, y):
    return F.cross_entropy(out[: len(y)], y, reduction="sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", MEET)
@pytest.mark.parametrize("n", [2, 4, 7])
def test_samples_that_meet_are_refused_each_time(case, mode, n):
    make, run = MEET[case]
    model = make()
    wrapped = MODES[mode](model)
    for _ in range(2):
        with pytest.raises(UnsupportedModuleError, match="samples meet between two forward passes"):
            run(wrapped, torch.randn(n, D)).sum().backward()
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.parameters())


@pytest.mark.parametrize("case", APART)
def test_samples_that_stay_apart_are_clipped(case):
    make, run = APART[case]
    model = make()
    reference, wrapped = copy.deepcopy(model), MODES["one pass"](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        for n in (3, 1, D, 8):
            x, y = torch.randn(n, D), torch.randint(3, (n,))
            loss(run(wrapped, x), y).backward()
            expected = clipped_sum(loop_over_samples(reference, lambda m, x, y: loss(run(m, x), y), x, y), C)
            for name, p in model.named_parameters():
                assert relative_error(p.grad, expected[name]) < 1e-4, name
            wrapped.zero_grad()


class Layers(nn.Module):
    """States (layers, N, D)."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(D, D, num_layers=2, batch_first=True)

    def forward(self, x, state=None):
        return self.rnn(x, state)


@pytest.mark.parametrize("n", [3, D])
def test_states_with_samples_in_their_second_dimension(n):
    model = Layers()
    reference, x = copy.deepcopy(model), torch.randn(n, 5, D)
    wrapped = MODES["one pass"](model)

    def run(m, x, between):
        _, state = m(x[:, :3])
        return m(x[:, 3:], between(state))[0].square().sum()

    with pytest.raises(UnsupportedModuleError, match="samples meet between two forward passes"):
        run(wrapped, x, lambda state: state.flip(1)).backward()
    run(wrapped, x, torch.tanh).backward()
    expected = clipped_sum(loop_over_samples(reference, lambda m, x: run(m, x, torch.tanh), x), C)
    assert all(relative_error(p.grad, expected[name]) < 1e-4 for name, p in model.named_parameters())


def test_samples_of_one_unit_may_meet():
    model = TwoWays()
    wrapped, x = MODES["one pass"](model), torch.randn(6, D)

    def run(ids, between):
        with wrapped.units(torch.tensor(ids), 3):
            wrapped(between(wrapped(x, encode=True))).sum().backward()

    with pytest.raises(UnsupportedModuleError, match="samples meet between two forward passes"):
        run([0, 1, 2, 0, 1, 2], lambda h: h.flip(0))
    run([0, 1, 2, 2, 1, 0], lambda h: h + h.flip(0))


def test_one_models_output_is_anothers_input():
    generator, critic = (MODES["one pass"](TwoWays()) for _ in range(2))
    for m in (generator, critic):
        m(torch.randn(3, D)).sum().backward()
        m.zero_grad()

    def fake():
        return generator(torch.randn(5, D), encode=True)

    with pytest.raises(UnsupportedModuleError, match="samples meet between two forward passes"):
        critic(fake() - fake().mean(0)).sum().backward()
    with pytest.raises(UnsupportedModuleError, match="samples meet between two forward passes"):
        critic(torch.cat([fake()] * 2)).sum().backward()  # two pairs of samples for each
    with pytest.raises(UnsupportedModuleError, match="samples meet between two forward passes"):
        critic(generator(torch.randn(6, D), encode=True).view(3, 2, D).mean(1)).sum().backward()  # one of two
    critic(torch.cat([torch.randn(5, D), fake()])).sum().backward()
    assert generator._module.encoder.weight.grad.any() and critic._module.head.weight.grad.any()


def test_what_cannot_be_gone_through_is_said():
    wrapped = MODES["one pass"](TwoWays())
    with pytest.warns(DpfastWarning, match="reentrant checkpoint"):
        called_twice(lambda h: checkpoint(torch.sin, h, use_reentrant=True))(
            wrapped, torch.randn(3, D)
        ).sum().backward()
