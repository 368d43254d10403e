"""Norms of rank one whose squares underflow. Bounded: the exact norm of ``p.grad``, to which one sample adds."""

import math

import pytest
import torch
from released import MARGIN, gradients, norm_over
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.factors import OuterProduct


@pytest.mark.parametrize("tiny", [1e-90, 1e-81, 1e-140])
def test_fp64_products_that_underflow_are_clipped(tiny):
    """a = b = 1e-90: ``‖a‖²‖b‖²`` = 1e-360 is no number of fp64, and ``‖g‖`` = 1e-180 is far above C = 1e-200."""
    model = GradSampleModuleFastGradientClipping(
        nn.Linear(1, 1, bias=False).double(), loss_reduction="sum", max_grad_norm=tiny**2 * 1e-20
    )
    (model(torch.full((1, 1), tiny, dtype=torch.float64)) * tiny).sum().backward()
    assert norm_over(gradients(model), model.max_grad_norm) <= 1.0 + MARGIN


def test_bound_of_rank_one_is_never_zero_where_the_norm_is_not():
    """The upper bound of ``‖G‖²`` is at least its exact value, or, where that underflows, not zero."""
    a = torch.full((1, 1, 1), 1e-90, dtype=torch.float64)
    upper = OuterProduct(a, a).sq_norm().upper
    assert math.sqrt(float(upper)) >= 1e-180
