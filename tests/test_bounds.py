"""The proven bounds hold on inputs built to cancel, and stay close on ordinary ones."""

from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dpfast import bounds, cost, ops, reference
from dpfast.clipping import ConstantFlatClipper, clip_factors
from dpfast.factors import Lookup, OuterProduct, row_sum


def hostile(n, t, width, magnitude, dtype, seed):
    """Tokens in pairs ±x that differ in the last bits: nearly all of the sum cancels."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(n, -(-t // 2), width, generator=generator)
    twin = -half * (1.0 + 2.0**-20 * torch.randn(half.shape, generator=generator))
    x = torch.cat([half, twin], dim=1)[:, torch.randperm(2 * half.shape[1], generator=generator)][:, :t]
    return (x * magnitude).to(dtype)


def exact_norms(a, b):
    """fp64 of fp64 products of at most 24 bits each; the remaining error is far below the bounds' margin."""
    return torch.einsum("ntp,ntd->npd", b.double(), a.double()).flatten(1).norm(dim=1)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    t=st.integers(1, 512),
    d=st.integers(1, 48),
    p=st.integers(1, 48),
    exponents=st.tuples(st.floats(-20, 15), st.floats(-20, 15)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    constant_side=st.booleans(),
    c=st.floats(-10, 10).map(lambda e: 10.0**e),
    seed=st.integers(0, 10**6),
)
def test_no_clipped_sample_exceeds_c(t, d, p, exponents, dtype, constant_side, c, seed):
    a = hostile(2, t, d, 10.0 ** exponents[0], dtype, seed)
    b = hostile(2, t, p, 10.0 ** exponents[1], dtype, seed + 1)
    if constant_side:  # b the same at each position: the pairs of a cancel against each other
        b = b[:, :1].expand_as(b)
    a, b = (torch.nan_to_num(x, nan=0.0) for x in (a, b))
    finite = torch.isfinite(a).all() and torch.isfinite(b).all()
    exact = exact_norms(a, b) if finite else None
    factors = {
        "direct": reference.direct_sq_norm(a, b).upper,
        "gram": reference.gram_sq_norm(a, b).upper,
        "kept": OuterProduct(a, b).materialized().sq_norm().upper,
    }
    if t == 1:
        factors["rank_one"] = reference.rank_one_sq_norm(a, b).upper
    for name, upper in factors.items():
        clip = clip_factors(ConstantFlatClipper(c), [upper.sqrt()])[0].float().double()
        if finite:
            assert (clip * exact <= c).all(), name
        else:
            assert (clip[~torch.isfinite(upper)] == 0).all(), name
    if finite:
        sums = b.double().sum(1).norm(dim=1)
        assert (row_sum(b).sq_norm().upper.sqrt() >= sums).all()


def test_against_exact_rationals():
    """fp64 is no oracle where everything cancels; fractions are."""
    a = hostile(1, 8, 3, 1e3, torch.float32, 0)
    b = hostile(1, 8, 2, 1e3, torch.float32, 1)[:, :1].expand(1, 8, 2)
    exact = Fraction(0)
    for p in range(2):
        for d in range(3):
            entry = sum(Fraction(b[0, t, p].item()) * Fraction(a[0, t, d].item()) for t in range(8))
            exact += entry * entry
    for way in (reference.direct_sq_norm, reference.gram_sq_norm):
        assert Fraction(way(a, b).upper.item()) >= exact


def test_lookups_that_cancel():
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


def test_the_kernels_bounds_hold_too():
    a = hostile(2, 70, 20, 1.0, torch.float32, 0)
    b = hostile(2, 70, 30, 1.0, torch.float32, 1)[:, :1].expand(2, 70, 30)
    for way in ("direct", "gram"):
        norm = ops.certified_sq_norm(a, b, way=way, backend="triton")
        assert (norm.upper.sqrt() >= exact_norms(a, b)).all()


def test_reduced_matmul_precision_widens_the_bound():
    a, b = torch.randn(2, 9, 8), torch.randn(2, 9, 7)
    tight = reference.direct_sq_norm(a, b).upper
    try:
        torch.set_float32_matmul_precision("medium")
        wide = reference.direct_sq_norm(a, b).upper
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (wide > tight * 1.001).all()


def test_gamma():
    assert bounds.gamma(0, torch.float32) == 0.0
    assert bounds.gamma(100, torch.float32) > 100 * 2.0**-24
    assert bounds.gamma(100, torch.float64) < bounds.gamma(100, torch.float32)
    assert bounds.gamma(2.0**24, torch.float32) == float("inf")
