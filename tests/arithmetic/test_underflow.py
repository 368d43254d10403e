"""Bounds where the squares of one operand underflow and its products with the other do not."""

import pytest
import torch

from dpfast.arithmetic import ops
from dpfast.factors import OuterProduct

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


@pytest.mark.parametrize("p", [5, 80])
def test_written_out_gradients_of_such_rows(p):
    a, b = torch.randn(2, 40, 90, device=DEVICE), torch.randn(2, 40, p, device=DEVICE)
    plain = OuterProduct(a, b).materialized()
    uneven = OuterProduct(a * 2.0**-80, b * 2.0**60).materialized()
    assert (uneven.error >= 0.9 * 2.0**-20 * plain.error).all()


@pytest.mark.on_cpu
def test_products_that_are_flushed_to_zero_are_covered():
    """As hardware without subnormal numbers does."""
    a, b = (7e-20 * torch.randn(2, 40, width) for width in (90, 80))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    try:
        written = OuterProduct(a, b).materialized()
        values, error = written.values, written.error
    finally:
        torch.set_flush_denormal(False)
    exact = b.double().mT @ a.double()
    off = (values.double() - exact).flatten(1).norm(dim=1)
    assert (off > 0.1 * exact.flatten(1).norm(dim=1)).any()  # other threads do not flush
    assert (error >= off).all()
