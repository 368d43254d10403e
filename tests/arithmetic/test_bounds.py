"""The proven bounds hold on inputs built to cancel, and stay close on ordinary ones."""

from fractions import Fraction

import pytest
import torch
from cases import exact_norms, hostile

from dpfast.arithmetic import bounds, cost, kernel_norms, ops, reference_norms
from dpfast.factors import Lookup, OuterProduct


def test_against_exact_rationals():
    """fp64 is no oracle where everything cancels; fractions are."""
    a = hostile(1, 8, 3, 1e3, torch.float32, 0)
    b = hostile(1, 8, 2, 1e3, torch.float32, 1)[:, :1].expand(1, 8, 2)
    exact = Fraction(0)
    for p in range(2):
        for d in range(3):
            entry = sum(Fraction(b[0, t, p].item()) * Fraction(a[0, t, d].item()) for t in range(8))
            exact += entry * entry
    for way in (reference_norms.direct_sq_norm, reference_norms.gram_sq_norm):
        assert Fraction(way(a, b).upper.item()) >= exact


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_lookups_that_cancel(backend, monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", backend)
    rows = hostile(3, 64, 5, 1e4, torch.float32, 0)
    factor = Lookup(torch.zeros(3, 64, dtype=torch.long), rows, 4)
    assert (factor.sq_norm().upper.sqrt() >= rows.double().sum(1).norm(dim=1)).all()


@pytest.mark.parametrize(
    ("t", "d", "p"),
    [(1, 768, 768), (16, 768, 768), (64, 4096, 2048), (128, 256, 1024), (256, 768, 768), (1024, 128, 512)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_are_close_on_ordinary_data(t, d, p, dtype):
    a, b = torch.randn(2, t, d).to(dtype), torch.randn(2, t, p).to(dtype)
    way = cost.norm_way(t, d, p)
    norm = ops.certified_sq_norm(a, b, backend="reference")
    slack = (norm.upper.sqrt() / norm.value.sqrt() - 1.0).max()
    assert 0.0 <= slack <= 1e-3, (way, slack)


@pytest.mark.parametrize(("t", "d", "p"), [(70, 20, 30), (300, 70, 80), (70, 300, 150)])
def test_the_kernels_bounds_hold_too(t, d, p):
    a = hostile(2, t, d, 1.0, torch.float32, 0)
    b = hostile(2, t, p, 1.0, torch.float32, 1)[:, :1].expand(2, t, p)
    for way in ("direct", "gram"):
        norm = ops.certified_sq_norm(a, b, way=way, backend="triton")
        assert (norm.upper.sqrt() >= exact_norms(a, b)).all()


def test_chains_keep_the_direct_ways_slack_small():
    """S / ‖G‖ is about √T on ordinary data."""
    one = torch.ones(1, dtype=torch.float64)

    def slack(t, chain):
        error = bounds.direct_error(one, positions=t, numel=1, dtype=torch.float32, kernel_chain=chain)
        return error.item() * t**0.5

    chain = kernel_norms.import_kernels()[0].CHAIN
    assert slack(1024, chain) < 1.01e-3
    assert slack(1024, 1024) > 7e-3
    assert slack(100, chain) == slack(100, 100)


def test_kept_gradients_carry_the_error_of_what_made_them(monkeypatch):
    """Tensor cores cut off: what kernels wrote may be further from the exact gradient than what the reference wrote."""
    a, b = torch.randn(2, 200, 70), torch.randn(2, 200, 80)
    monkeypatch.setenv("DPFAST_BACKEND", "reference")
    by_reference = OuterProduct(a, b).materialized().error
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    kept = OuterProduct(a, b).materialized()
    chain = kernel_norms.import_kernels()[0].CHAIN
    row_products = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    least = bounds.gamma(bounds.kernel_terms(200, chain), torch.float32) * row_products
    assert (kept.error >= least).all()
    assert (kept.error > by_reference).all()
    assert (kept.sq_norm().upper.sqrt() >= exact_norms(a, b)).all()


def test_reduced_matmul_precision_widens_the_bound():
    a, b = torch.randn(2, 9, 8), torch.randn(2, 9, 7)
    tight = reference_norms.direct_sq_norm(a, b).upper
    try:
        torch.set_float32_matmul_precision("medium")
        wide = reference_norms.direct_sq_norm(a, b).upper
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (wide > tight * 1.001).all()


def test_gamma():
    assert bounds.gamma(0, torch.float32) == 0.0
    assert bounds.gamma(100, torch.float32) > 100 * 2.0**-24
    assert bounds.gamma(100, torch.float64) < bounds.gamma(100, torch.float32)
    assert bounds.gamma(2.0**24, torch.float32) == float("inf")
