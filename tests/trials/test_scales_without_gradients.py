"""Weights that a forward makes with what it takes of them under ``torch.no_grad``: scales of quantisation-aware
training, spectral norms, largest entries."""

import pytest
import torch
import torch.nn.functional as F
from cases import clipped_as_told
from in_both_modes import check
from released import in_two_passes
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

C, N, D, P = 0.3, 5, 6, 4


class Scaled(nn.Linear):
    """``made`` is the weight that it works with."""

    def forward(self, x):
        return F.linear(x, self.made(self.weight), self.bias)


class Quantised(Scaled):
    def made(self, weight):
        with torch.no_grad():
            scale = weight.abs().amax(1, keepdim=True) / 7
        steps = weight * (1 / scale)
        return (steps + (steps.round() - steps).detach()) * scale.reshape(-1, 1)


class DividedByItsLargest(Scaled):
    @torch.no_grad()
    def largest(self, weight):
        return weight.flatten().abs().max()

    def made(self, weight):
        return weight / self.largest(weight)


class KeptScale(Scaled):
    """The scale is an attribute, as of torchao's fake quantizers."""

    def made(self, weight):
        with torch.no_grad():
            self.scale = weight.detach().std(1, keepdim=True) + 0.1
        return weight / self.scale


class Spectral(Scaled):
    """One step of a power iteration, from the same vector each time; the norm itself has a gradient."""

    def made(self, weight):
        with torch.no_grad():
            u = F.normalize(weight.sum(1), dim=0)
            v = F.normalize(weight.t().mv(u), dim=0)
        return weight / torch.dot(u, weight.mv(v))


class Rounding(torch.autograd.Function):
    """As in training: the function's forward turns gradients off once more."""

    @staticmethod
    def forward(ctx, weight):
        with torch.no_grad():
            scale = weight.abs().amax() / 3
        ctx.save_for_backward(scale)
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        return grad * (1 + scale)


class ByFunction(Scaled):
    def made(self, weight):
        with torch.no_grad():
            shift = weight.mean()
        return Rounding.apply(weight - shift) + weight


class Recorded(Scaled):
    """Gradients are on again within, and off around."""

    def made(self, weight):
        with torch.no_grad():
            scale = weight.abs().amax()
            with torch.enable_grad():
                made = weight * 2
        return made / scale


class OfAnother(nn.Module):
    """Uses its child's weight by itself."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(D, P, bias=False)

    def forward(self, x):
        with torch.no_grad():
            norm = self.child.weight.norm()
        return x @ (self.child.weight / norm).t()


KINDS = [Quantised, DividedByItsLargest, KeptScale, Spectral, ByFunction, Recorded, OfAnother]


def model_of(kind):
    torch.manual_seed(0)
    layer = OfAnother() if kind is OfAnother else kind(D, P)
    return nn.Sequential(nn.Linear(3, D), nn.Tanh(), layer, nn.Tanh())


def losses(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).sum(1)


@pytest.mark.parametrize("t", [N, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_as_a_loop_over_samples(kind, t):
    check(model_of(kind), torch.randn(N, t, 3), torch.randn(N + 1, t, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_two_passes(kind):
    model, x = model_of(kind), torch.randn(N, 3, 3)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    mode = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", passes=2)
    in_two_passes(mode, losses(mode, x), "sum")
    for name, expected in clipped_as_told(mode.get_clipping_coef(), exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ByFunction])
def test_as_a_graph(kind):
    model, x = model_of(kind), torch.randn(N, 3, 3)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    step = compile_step(model, losses, max_grad_norm=C, batch_size=N + 1, backend="eager")
    step(x)
    for name, expected in clipped_as_told(step.clip_factors, exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name


def test_a_graph_loses_no_gradient_of_a_function():
    """The weight had one beside it, by the sum, and that alone was taken."""
    step = compile_step(model_of(ByFunction), losses, max_grad_norm=C, batch_size=N, backend="eager")
    with pytest.raises(UnsupportedModuleError, match=r"2 \(ByFunction\): no gradient goes back .*autograd.Function"):
        step(torch.randn(N, 3, 3))
