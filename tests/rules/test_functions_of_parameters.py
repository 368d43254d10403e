"""Functions with a backward of their own (``autograd.Function``) that take samples and parameters: fused kernels."""

import warnings

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastError, DpfastWarning
from dpfast.testing import check_rule

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


class Scaled(torch.autograd.Function):
    """``x ∘ w + b``, as one knows it from fused normalisation."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x * weight + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)


class Twice(torch.autograd.Function):
    """``2 x ∘ w + b``, in which the parameter is seen only as what was made of it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        twice = weight * 2.0
        ctx.save_for_backward(x, twice)
        return x * twice + bias

    @staticmethod
    def backward(ctx, grad):
        x, twice = ctx.saved_tensors
        return grad * twice, 2.0 * (grad * x).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)


class Mapped(torch.autograd.Function):
    """The first, for vmap as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias):
        return x * weight + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    backward = Scaled.backward


class Fused(nn.Module):
    def __init__(self, function, size=4):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, size))

    def forward(self, x):
        return self.function.apply(x, self.weight, self.bias)


class Around(Fused):
    """Parameters at a module that has layers."""

    def __init__(self, function):
        super().__init__(function)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.outer(super().forward(torch.tanh(self.inner(x))))


class OfLayer(nn.Module):
    """The parameters of a layer that does not run itself."""

    def __init__(self):
        super().__init__()
        self.norm = Fused(Scaled)
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(Scaled.apply(x, self.norm.weight, self.norm.bias))


@pytest.mark.parametrize("function", [Scaled, Twice, Mapped])
@pytest.mark.parametrize(
    "model",
    [
        Fused,
        lambda function: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Fused(function), nn.Linear(4, 2)),
        Around,
    ],
    ids=["alone", "between", "around"],
)
def test_gradients_are_those_of_a_loop(function, model):
    with warnings.catch_warnings():
        warnings.simplefilter("error" if function is Mapped else "ignore", DpfastWarning)
        check_rule(model(function), X, dtypes=(torch.float32, torch.float64))


def test_it_is_said_that_they_take_a_loop():
    model = dpfast.GradSampleModule(nn.Sequential(nn.Linear(4, 4), Fused(Scaled)))
    with pytest.warns(DpfastWarning, match=r"1 \(Fused\) has no rule, and vmap cannot run it"):
        model(X).sum().backward()
    assert dpfast.explain(model, X).fallbacks == ("1 (Fused)",)


@pytest.mark.parametrize("wrapped", [False, True])
def test_explain_refuses_what_a_step_refuses(wrapped):
    model = OfLayer()
    asked = dpfast.GradSampleModule(model) if wrapped else model
    model.layer.bias.grad = before = torch.ones(2)
    x = X.clone().requires_grad_()
    with pytest.raises(DpfastError, match="without being clipped"):
        dpfast.explain(asked, x)
    assert x.grad is None and model.layer.bias.grad is before and bool((before == 1.0).all())
    assert all(p.grad is None for p in (model.norm.weight, model.norm.bias, model.layer.weight))
    with pytest.raises(DpfastError, match="without being clipped"):
        (asked if wrapped else dpfast.GradSampleModule(model))(X).sum().backward()


class Accumulates(torch.autograd.Function):
    """Adds to ``p.grad`` itself, as kernels do that accumulate gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight + bias

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.weight.grad = (grad * x).flatten(0, -2).sum(0)
            return grad * ctx.weight, None, grad.flatten(0, -2).sum(0)


@pytest.mark.filterwarnings("ignore::dpfast.errors.DpfastWarning")
def test_what_writes_gradients_itself_is_refused():
    model = dpfast.GradSampleModule(nn.Sequential(nn.Linear(4, 4), Fused(Accumulates)))
    with pytest.raises(DpfastError, match=r"1 \(Fused\).*writes gradients of its parameters itself"):
        model(X).sum().backward()
