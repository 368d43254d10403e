"""Norm layers whose statistics overflow or underflow: the exact gradient is still clipped, or the sample is dropped.

Bounded: ``c_n·‖g_n‖`` with the module's factor c_n and the gradient g_n of exact arithmetic, taken in fp64.
"""

import pytest
import torch
from released import MARGIN
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping

pytestmark = pytest.mark.filterwarnings("ignore:1 of 1 samples")


def released_norm(make, inputs: torch.Tensor, backprops: torch.Tensor) -> float:
    """``c·‖g‖`` for C = 1 of the layer that ``make()`` builds, alone in its model."""
    model = GradSampleModuleFastGradientClipping(make(), loss_reduction="sum")
    (model(inputs) * backprops).sum().backward()
    exact = make().double().cpu()  # a GPU's constant row is NaN where eps is 0
    (exact(inputs.double().cpu()) * backprops.double().cpu()).sum().backward()
    squares = [p.grad.square().sum() for p in exact.parameters() if p.grad is not None]
    return float(model.get_clipping_coef().double().cpu() * torch.stack(squares).sum().sqrt())


def layer_norm(eps: float):
    return lambda: nn.LayerNorm(4, eps=eps, bias=False)


def rms_norm(eps: float):
    return lambda: nn.RMSNorm(4, eps=eps)


SIGNS = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
BACKPROPS = 1.28e5 * torch.tensor([[1.0, 2.0, 3.0, 4.0]])


@pytest.mark.parametrize("size", [1e20, 1e30, 1e38])
@pytest.mark.parametrize("make", [layer_norm(1e-5), rms_norm(1e-6)], ids=["LayerNorm", "RMSNorm"])
def test_squares_that_overflow(make, size):
    """x = ±1e20: fp32's mean square is inf, x̂ comes out as 0, and the exact gradient is 7e5·C."""
    assert released_norm(make, size * SIGNS, BACKPROPS) <= 1.0 + MARGIN


@pytest.mark.parametrize(
    ("make", "size"),
    [(rms_norm(0.0), 2.7e-23), (rms_norm(0.0), 3.7e-23), (layer_norm(0.0), 3.7e-23)],
    ids=["RMSNorm", "RMSNorm 3.7e-23", "LayerNorm 3.7e-23"],
)
def test_squares_that_underflow(make, size):
    """eps = 0: the mean square is subnormal in fp32, with few bits or none."""
    assert released_norm(make, size * SIGNS, BACKPROPS) <= 1.0 + MARGIN


@pytest.mark.parametrize("scale", [1e19, 1.8e19, 2.5e19])
def test_squares_near_the_largest_number(scale):
    """Some squares overflow and others do not, or only their sum does."""
    torch.manual_seed(0)
    inputs = scale * torch.randn(1, 4)
    for make in (layer_norm(1e-5), rms_norm(1e-6)):
        assert released_norm(make, inputs, BACKPROPS) <= 1.0 + MARGIN


def of_rows(value: float, rest: float):
    """(1, 3, 4): a random row, a constant one, and one with both signs of a number (of zero, where it is 0)."""
    torch.manual_seed(0)
    return torch.stack([torch.randn(4), torch.full((4,), value), rest * torch.tensor([1.0, -1.0, 1.0, -1.0])])[None]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (layer_norm(1e-38), 0.0),
        (layer_norm(1e-12), 0.0),
        (layer_norm(1e-12), 0.7),
        (layer_norm(1e-30), 0.5),
        (rms_norm(1e-38), 0.0),
        (rms_norm(1e-12), 0.0),
        (lambda: nn.InstanceNorm1d(3, eps=0.0, affine=True), 0.0),
        (lambda: nn.InstanceNorm1d(3, eps=0.0, affine=True), 0.5),
        (lambda: nn.InstanceNorm1d(3, eps=1e-12, affine=True), 0.7),
        (lambda: nn.InstanceNorm1d(3, eps=1e-38, affine=True), 0.0),
    ],
)
def test_constant_rows_drop_nobody(make, value):
    """x̂ is 0 there; the sample was dropped, or clipped to a small part of C, by the statistics' error."""
    assert 0.9 < released_norm(make, of_rows(value, -0.0 if value == 0.0 else 1.0), BACKPROPS) <= 1.0 + MARGIN


@pytest.mark.parametrize("make", [layer_norm(0.0), rms_norm(0.0)])
def test_no_samples(make):
    model = GradSampleModuleFastGradientClipping(make())
    model(torch.zeros(0, 3, 4)).sum().backward()
    assert model.get_clipping_coef().shape == (0,) and not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("make", [layer_norm(0.0), rms_norm(0.0), lambda: nn.InstanceNorm1d(1, eps=0.0, affine=True)])
@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_rows_are_no_rows_of_zeros(make, flush):
    """Nor where the processor takes subnormal numbers for zero: the sample is dropped."""
    model = GradSampleModuleFastGradientClipping(make(), loss_reduction="sum")
    inputs = 1e-40 * SIGNS[None]
    torch.set_flush_denormal(flush)
    try:
        (model(inputs).nan_to_num() * BACKPROPS).sum().backward()
    finally:
        torch.set_flush_denormal(False)
    for p in model.parameters():
        p.grad = None
    assert model.get_clipping_coef() == 0
