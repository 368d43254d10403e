"""``compile_step`` of a model whose parameters meet samples in an ``autograd.Function``: refused by name or right."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from cases import clipped_as_told
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import EscapedGradientError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

C, N, T, D = 0.5, 5, 4, 6


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).sum((0, 1))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gain = nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x):
        return Times.apply(self.first(x), self.gain)


class Head(nn.Module):
    """Its weight is an argument of a reentrant checkpoint, or is known to the function that it runs."""

    def __init__(self, as_argument):
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 5, bias=False)
        self.as_argument = as_argument

    def forward(self, x):
        x, weight = torch.tanh(self.first(x)), self.head.weight
        if self.as_argument:
            return checkpoints.checkpoint(F.linear, x, weight, use_reentrant=True)
        return checkpoints.checkpoint(lambda x: F.linear(x, weight), x, use_reentrant=True)


def losses(model, x):
    return model(x).sin().sum((1, 2))


def step(model):
    return compile_step(model, losses, max_grad_norm=C, batch_size=N + 1, backend="eager")


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (Gain, UnsupportedModuleError, "Gain: it has no rule"),  # the eager step takes it sample by sample
        (lambda: Head(as_argument=True), EscapedGradientError, r"head \(Linear\), \(5, 6\)"),
    ],
    ids=["function", "checkpoint"],
)
def test_a_gradient_that_a_function_takes_to_a_parameter_is_refused(make, error, name):
    """It was zero in the captured graph, and norms left it out."""
    model = make()
    with pytest.raises(error, match=name):
        step(model)(torch.randn(N, T, D))
    assert all(p.grad is None for p in model.parameters())


def test_a_checkpoint_that_runs_what_knows_the_weight():
    model, x = Head(as_argument=False), torch.randn(N, T, D)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    compiled = step(model)
    compiled(x)
    for name, expected in clipped_as_told(compiled.clip_factors, exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


class Made(nn.Module):
    """Of parameters alone, by a function with a backward of its own, and then brought to samples."""

    def __init__(self, made):
        super().__init__()
        self.first, self.made = nn.Linear(D, D), made
        self.w, self.v = nn.Parameter(torch.randn(T, D)), nn.Parameter(torch.randn(T, D))
        self.table = nn.Embedding(T, D)

    def forward(self, x):
        return torch.tanh(self.first(x)) * self.made(self)


MADE = {
    "two parameters": lambda m: Product.apply(m.w, m.v),
    "and one of them": lambda m: Product.apply(m.w, m.v) + m.w,
    "one, and the other beside it": lambda m: Product.apply(m.w, m.v.detach()) + m.v,
    "twice": lambda m: Product.apply(Product.apply(m.w, m.v), m.v),
    "made of a parameter": lambda m: Product.apply(m.w * 2, m.v) + m.w,
    "a table": lambda m: Product.apply(m.table.weight, m.v) + m.table.weight,
    "a layer's output": lambda m: Product.apply(m.table(torch.arange(T)), m.v) + m.v,
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_a_function_of_parameters_alone(made):
    """Its gradients were lost in the captured graph, wherever another came to the same parameters; eagerly they are
    right."""
    model, x = Made(made), torch.randn(N, T, D)
    with pytest.raises(UnsupportedModuleError, match=r"no gradient goes back through .*autograd.Function"):
        step(model)(x)
    assert all(p.grad is None for p in model.parameters())
    check_eagerly(model, x)


def check_eagerly(model, x):
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    for name, expected in clipped_as_told(wrapped.get_clipping_coef(), exact, C).items():
        if expected.any():
            assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name
