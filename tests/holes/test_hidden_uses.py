"""Uses of a parameter that one forward pass does not show: behind a checkpoint that runs its part again, in another
thread, before another backward pass, in a function that runs a layer in its backward pass alone. No norm is taken as of
the only use where there is another one."""

import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from released import MARGIN, gradients, in_two_passes, norm_over
from torch import nn

from dpfast import ConstantPerLayerClipper, GradSampleModuleFastGradientClipping
from dpfast.errors import StateError
from dpfast.testing import loop_over_samples, norms_of, relative_error

C, N, D = 1.0, 5, 6

MODES = {
    "one pass": {},
    "written": {"use_ghost_clipping": False},
    "budget": {"memory_budget": 3.0},
    "two passes": {"passes": 2},
    "by layer": {"norm_clipper": "each"},
}


class Again(nn.Module):
    """A layer, or its weight alone, within a reentrant checkpoint and outside of it, in front or behind."""

    def __init__(self, weight_alone, outside_first):
        super().__init__()
        self.shared, self.own = nn.Linear(D, D), nn.Linear(D, D)
        self.weight_alone, self.outside_first = weight_alone, outside_first

    def within(self, x):
        x = torch.tanh(self.own(x))
        return F.linear(x, self.shared.weight) if self.weight_alone else self.shared(x)

    def checkpointed(self, x):
        return checkpoints.checkpoint(self.within, x, use_reentrant=True)

    def forward(self, x):
        if self.outside_first:
            return self.checkpointed(torch.tanh(self.shared(x)))
        return self.shared(torch.tanh(self.checkpointed(x)))


def loss(model, x):
    return torch.sin(3 * model(x)).flatten(1).sum(1)


def wrapped(model, mode="two passes", loss_reduction="sum"):
    options = dict(MODES[mode])
    if "norm_clipper" in options:
        options["norm_clipper"] = ConstantPerLayerClipper([C] * len(list(model.parameters())))
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction=loss_reduction, **options)


def step(model, losses):
    if model.passes == 2:
        in_two_passes(model, losses, "sum")
    else:
        losses.sum().backward()


def samples():
    torch.manual_seed(0)
    return torch.randn(N, 4, D, dtype=torch.float64, requires_grad=True)


def exact_norms(model, x, f=loss):
    return norms_of(loop_over_samples(model, lambda m, x: f(m, x).sum(), x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_alone", [False, True], ids=["layer", "weight"])
@pytest.mark.parametrize("outside_first", [True, False], ids=["in front", "behind"])
def test_a_use_outside_of_a_checkpoint_that_has_another(outside_first, weight_alone, mode):
    """In front of it, the outer use comes last in the backward pass; its norm stood for both, 3.5 times C was released.
    Behind it, it comes first, and the inner one was an error."""
    x = samples()
    model = Again(weight_alone, outside_first).double()
    true = exact_norms(model, x)
    assert true.min() > 2 * C
    model = wrapped(model, mode)
    step(model, loss(model, x))
    assert relative_error(model.get_norm_sample().double(), true) < 1e-6
    for i in range(2):  # one sample alone shows how far it moves the sum
        model.zero_grad()
        step(model, loss(model, x[i : i + 1]))
        if mode == "by layer":
            assert all(norm_over([g], C) <= 1.0 + MARGIN for g in gradients(model))
        else:
            assert norm_over(gradients(model), C) <= 1.0 + MARGIN


class RunsInBackward(torch.autograd.Function):
    """Its forward runs nothing; its backward runs a layer, twice the input's way."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), grad)
        return grad + x.grad, None


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(D, D)

    def forward(self, x):
        return self.shared(RunsInBackward.apply(x, self.shared))


@pytest.mark.parametrize("mode", ["one pass", "two passes", "by layer"])
def test_a_use_that_nothing_shows_before_is_an_error(mode):
    """The norm of the use that came first has been taken; it would have been the only one."""
    x = samples()
    model = wrapped(Late().double(), mode)
    losses = loss(model, x)
    with pytest.raises(StateError, match=r"parameter shared\.weight is used again by this backward pass"):
        losses.sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["one pass", "two passes", "by layer"])
@pytest.mark.parametrize("last", ["one", "other"])
def test_forward_passes_in_threads_that_live_at_once(last, mode):
    """One calls the model twice, and the other once: with two passes the norm of that one was all there was."""
    x = samples().detach()
    model = nn.Sequential(nn.Linear(D, D)).double()
    true = exact_norms(model, x, lambda m, x: m(x).cos() + m(torch.tanh(x)).sin() + m(2 * x).sin())
    model, found, turn = wrapped(model, mode), {}, {"one": threading.Event(), "other": threading.Event()}

    def run(name, *inputs):
        if name == last:
            turn[name].wait(60)
        found[name] = [model(x) for x in inputs]
        for event in turn.values():
            event.set()

    threads = [threading.Thread(target=run, args=a) for a in (("one", x, torch.tanh(x)), ("other", 2 * x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first, second), (third,) = found["one"], found["other"]
    (first.cos() + second.sin() + third.sin()).sum().backward()
    assert relative_error(model.get_norm_sample().double(), true) < 1e-6


@pytest.mark.parametrize("mode", ["one pass", "two passes", "by layer"])
def test_another_backward_pass_between_two_forward_passes(mode):
    """It forgot the first one's uses, and the joint backward pass was an error."""
    x = samples().detach()
    model = nn.Linear(D, D).double()
    true = exact_norms(model, x, lambda m, x: m(x).sin() + m(-x).cos())
    model = wrapped(model, mode)
    before = model(x)
    model(x).sum().backward()
    model.zero_grad()
    (before.sin() + model(-x).cos()).sum().backward()
    assert relative_error(model.get_norm_sample().double(), true) < 1e-6


@pytest.mark.parametrize("mode", ["two passes", "by layer"])
def test_a_graph_that_a_backward_pass_has_kept_is_an_error(mode):
    """Its uses are forgotten, as nearly all graphs are freed."""
    x = samples().detach()
    model = wrapped(nn.Linear(D, D).double(), mode)
    kept = model(x).sin()
    kept.sum().backward(retain_graph=True)
    model.zero_grad()
    with pytest.raises(StateError, match=r"is used again by this backward pass .* no other backward pass between"):
        (kept + model(-x).cos()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_uses_are_counted_anew_in_each_step():
    """Whatever has come of the ones before: a loss that is still there, a forward pass that came to nothing."""
    x = samples().detach()
    model = wrapped(nn.Linear(D, D).double(), "one pass")
    seen, on_factor = [], model.on_factor
    model.on_factor = lambda step, p, factor, only_use: seen.append(only_use) or on_factor(step, p, factor, only_use)
    model._tapped.observe = lambda *_: None  # nothing waits for others alike
    for _ in range(3):
        model(x)
        losses = loss(model, x)
        losses.sum().backward()
        losses = loss(model, x)
        losses.sum().backward()
    assert seen == [False, False, True, True] * 3
