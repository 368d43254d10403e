"""Factors below the smallest normal number of fp32: ``‖c_n N g_n‖ <= C`` of what is really in ``p.grad``.

Bounded: the exact norm of ``p.grad``, to which one sample adds (the others have gradients of zero).
"""

import pytest
import torch
from released import MARGIN, gradients, norm_over
from torch import nn

from dpfast import ConstantPerLayerClipper, GradSampleModuleFastGradientClipping, NormClipper
from dpfast.arithmetic import towards_zero


def one_weight(dtype: torch.dtype, **options) -> GradSampleModuleFastGradientClipping:
    return GradSampleModuleFastGradientClipping(nn.Linear(1, 1, bias=False).to(dtype), **options)


# 1/2 of the smallest subnormal number and a little more: rounded to nearest it doubles.
@pytest.mark.parametrize("backprop", [2.0**150 * (1.0 - 2.0**-k) for k in (2, 8, 12, 21)])
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_factor_that_is_subnormal_in_fp32_is_never_rounded_up(backprop, per_layer):
    """fp64 weights: a factor near 7e-46 is applied as it is or smaller, never as the next number of fp32."""
    clipper = ConstantPerLayerClipper(1.0) if per_layer else None
    model = one_weight(torch.float64, loss_reduction="sum", norm_clipper=clipper)
    (model(torch.ones(1, 1, dtype=torch.float64)) * backprop).sum().backward()
    assert norm_over(gradients(model), 1.0) <= 1.0 + MARGIN
    assert norm_over(gradients(model), 1.0) >= 0.5  # and is not thrown away either


@pytest.mark.parametrize(("samples", "backprop"), [(256, 1.9425e19), (4096, 1.755e19), (65536, 1.92e19)])
def test_factors_of_a_mean_are_rounded_once_with_n(samples, backprop):
    """fp32 weights, C = 1: ``c_n·N`` is a normal number or nearly, so no bit of it may be lost by rounding c_n first.

    The gradient is the largest that fp32 holds; the sample is one among N of a mean.
    """
    model = one_weight(torch.float32)
    inputs = torch.zeros(samples, 1)
    inputs[0] = 1.8e19
    weights = torch.zeros(samples, 1)
    weights[0] = backprop  # the mean's 1/N is in it
    (model(inputs) * weights).sum().backward()
    assert norm_over(gradients(model), 1.0) <= 1.0 + MARGIN


@pytest.mark.parametrize("share", [1.55, 1.9, 2.6, 6.7])
@pytest.mark.parametrize("per_layer", [False, True])
def test_subnormal_factors_of_fp32_weights(share, per_layer):
    """C/norm is ``share`` times the smallest number of fp32: a sum in fp32 takes no more of it than that."""
    limit = share * 2.0**-149 * 2.0**126
    clipper = ConstantPerLayerClipper(limit) if per_layer else None
    model = one_weight(torch.float32, loss_reduction="sum", norm_clipper=clipper, max_grad_norm=limit)
    (model(torch.full((1, 1), 2.0**63)) * 2.0**63).sum().backward()
    assert 0.5 <= norm_over(gradients(model), limit) <= 1.0 + MARGIN


def test_rounding_towards_zero():
    """Of numbers between two of fp32, of either sign, and of those that fp32 has or has not."""
    tiny = 2.0**-149
    values = [1.9 * tiny, 0.9 * tiny, -1.9 * tiny, 1.0 + 2.0**-24 + 2.0**-30, 0.5, 1e300, 0.0]
    x = torch.tensor(values, dtype=torch.float64)
    largest = torch.finfo(torch.float32).max
    assert towards_zero(x, torch.float32).tolist() == [tiny, 0.0, -tiny, 1.0, 0.5, largest, 0.0]


def test_a_clipper_without_clamp_gives_no_nan_for_gradients_of_zero():
    """``C / norm`` of an all-zero fp64 gradient is 1e154: the factor stays finite and p.grad is zero, not NaN."""

    class Unclamped(NormClipper):
        thresholds = torch.tensor([1.0], dtype=torch.float64)

        def calc_clipping_factors(self, norms):
            return [1.0 / norm for norm in norms]

    model = GradSampleModuleFastGradientClipping(
        nn.Linear(2, 2).double(), loss_reduction="sum", norm_clipper=Unclamped()
    )
    (model(torch.zeros(3, 2, dtype=torch.float64)) * 0.0).sum().backward()
    assert torch.isfinite(model.get_clipping_coef()).all()
    assert norm_over(gradients(model), 1.0) == 0.0
