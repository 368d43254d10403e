"""Bounds where the squares of one operand underflow and its products with the other do not."""

import pytest
import torch

from dpfast import ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("way", ["direct", "gram"])
@pytest.mark.parametrize("p", [5, 80])
def test_rows_whose_squares_underflow_are_not_taken_for_zero(way, p, backend):
    """Scaled by powers of two, the pair has the same rounding errors, and its bound must be as far from its norm."""
    a, b = torch.randn(2, 40, 90, device=DEVICE), torch.randn(2, 40, p, device=DEVICE)
    plain = ops.certified_sq_norm(a, b, way=way, backend=backend)
    uneven = ops.certified_sq_norm(a * 2.0**-80, b * 2.0**60, way=way, backend=backend)
    assert (uneven.upper / uneven.value - 1 >= 0.9 * (plain.upper / plain.value - 1)).all()
