"""What losses or a forward reach by a closure or a global, and train beside the model."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError

TAU = nn.Parameter(torch.tensor(1.5))
N = 6


class Tempered(nn.Linear):
    def forward(self, x):
        return super().forward(x) / TAU


def by_closure():
    head = nn.Linear(4, 1)
    return nn.Linear(6, 4), lambda model, x: head(model(x)).sum(1), head.bias, r"head\.(weight|bias)"


def computed_before():
    head = nn.Linear(4, 1)
    weight = head.weight * 2
    return nn.Linear(6, 4), lambda model, x: (model(x) * weight).sum(1), head.weight, "a tensor"


def by_global_of_the_losses():
    return nn.Linear(6, 4), lambda model, x: model(x).sum(1) / TAU, TAU, "TAU"


def by_global_of_a_forward():
    return nn.Sequential(Tempered(6, 4)), lambda model, x: model(x).sum(1), TAU, "TAU"


@pytest.mark.parametrize("made", [by_closure, computed_before, by_global_of_the_losses])
@pytest.mark.parametrize("before", [None, 3.0])
def test_a_stranger_that_is_trained_is_refused_by_name(made, before):
    model, losses, stranger, name = made()
    stranger.grad = before if before is None else torch.full_like(stranger, before)
    step = dpfast.compile_step(model, losses, max_grad_norm=1.0, batch_size=N, backend="eager")
    with pytest.raises(UnsupportedModuleError, match=f"a gradient reaches {name} .*no parameter of the model"):
        step(torch.randn(5, 6))
    assert stranger.grad is None if before is None else bool((stranger.grad == before).all())
    stranger.grad = None
    assert all(p.grad is None for p in model.parameters())


def test_a_stranger_in_a_forward():
    model, losses, stranger, _ = by_global_of_a_forward()
    step = dpfast.compile_step(model, losses, max_grad_norm=1.0, batch_size=N, backend="eager")
    with pytest.raises(UnsupportedModuleError):
        step(torch.randn(5, 6))
    assert stranger.grad is None


def test_a_stranger_that_is_frozen_is_none():
    model, _, _, _ = by_closure()
    head = nn.Linear(4, 1).requires_grad_(False)
    x = torch.randn(5, 6)
    step = dpfast.compile_step(
        model, lambda model, x: head(model(x)).sum(1), max_grad_norm=1e9, batch_size=N, backend="eager"
    )
    step(x)
    expected = torch.autograd.grad(head(model(x)).sum(), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, expected)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return 2.0 * weight

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * grad


class OfItsWeight(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Doubled.apply(self.weight), self.bias)


def test_a_function_of_a_weight_alone_is_refused_with_the_layer():
    """In a captured step; eagerly its backward is asked for each sample."""
    model, x = nn.Sequential(OfItsWeight(6, 4)), torch.randn(N, 6)
    step = dpfast.compile_step(
        model, lambda model, x: model(x).square().sum(1), max_grad_norm=1.0, batch_size=N, backend="eager"
    )
    with pytest.raises(UnsupportedModuleError, match=r"0 \(OfItsWeight\): no gradient goes back .*autograd.Function"):
        step(x)
    expected = torch.autograd.grad(model(x[:1]).square().sum(), model[0].weight)[0]
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad_sample[0], expected)
