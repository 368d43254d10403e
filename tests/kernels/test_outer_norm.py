"""outer_norm against fp64."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kernel_cases import (
    BF16,
    DEVICE,
    DTYPE_PAIRS,
    FP32,
    assert_close,
    call,
    empty_shapes,
    few,
    identical,
    ordinary,
    pairs,
    tiles,
    wide,
)

from dpfast.kernels import outer_norm, outer_product
from dpfast.kernels._tiles import Tile


def oracle(a, b):
    """sq_norm and bias_sq_norm."""
    return torch.einsum("ntp,ntd->npd", b, a).square().sum((1, 2)), b.sum(1).square().sum(1)


@few
@given(pair=pairs(), tile=st.none() | tiles(), bias=st.booleans())
def test_any_shape_layout_and_tile(pair, tile, bias):
    a, b = map(wide, pair)
    result = call(outer_norm, *pair, bias=bias, row_products=not bias, tile=tile)
    sq_norm, bias_sq_norm = oracle(a, b)
    scale, bias_scale = oracle(a.abs(), b.abs())
    assert_close(result.sq_norm, sq_norm, scale)
    assert (result.bias_sq_norm is not None) == bias
    if bias:
        assert_close(result.bias_sq_norm, bias_sq_norm, bias_scale)
    else:
        assert_close(result.row_products, (a.norm(dim=2) * b.norm(dim=2)).sum(1))


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_ordinary_data(dtypes):
    pair = ordinary(dtypes)
    result = call(outer_norm, *pair, bias=True)
    for actual, expected in zip(result[:2], oracle(*map(wide, pair)), strict=True):
        assert_close(actual, expected, tolerance=1e-5)


def test_bitwise_the_norm_that_outer_product_takes_with_the_same_tile():
    a, b = (x.tensor for x in ordinary((BF16, BF16)))
    written = outer_product(a, b, bias=True, norm=True)
    direct = outer_norm(a, b, bias=True)
    if DEVICE == "cpu":  # the interpreter's tiles are the same for both
        assert identical(direct.sq_norm, written.sq_norm)
    assert identical(direct.bias_sq_norm, written.bias_sq_norm)


def test_row_products_change_nothing_else_and_are_those_of_outer_product():
    a, b = (x.tensor for x in ordinary((BF16, BF16)))
    with_them, without = outer_norm(a, b, bias=True, row_products=True), outer_norm(a, b, bias=True)
    assert identical(with_them.sq_norm, without.sq_norm) and identical(with_them.bias_sq_norm, without.bias_sq_norm)
    assert without.row_products is None
    if DEVICE == "cpu":
        assert identical(with_them.row_products, outer_product(a, b, row_products=True).row_products)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-18])
def test_row_products_are_no_smaller_for_squares_that_underflow(size):
    a, b = (size * x.tensor for x in ordinary((FP32, FP32)))
    products = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    result = outer_norm(a, b, row_products=True)
    assert (result.row_products.double() >= (1.0 - 1e-6) * products).all()
    assert (result.row_products.double() >= 70 * 2.0**-126 * (96 * 130) ** 0.5 * (1.0 - 1e-6)).all()


def test_positions_in_parts():
    """Bitwise the norm that is taken of gradients in parts."""
    pair = ordinary((BF16, BF16), N=2, T=300, D=40, P=72)
    tile = Tile(32, 64, 64, 0, 4, 1, "test", PART=128)
    direct = call(outer_norm, *pair, bias=True, row_products=True, tile=tile)
    written = call(outer_product, *pair, bias=True, norm=True, row_products=True, tile=tile)
    assert identical(direct.sq_norm, written.sq_norm)
    assert identical(direct.bias_sq_norm, written.bias_sq_norm)
    assert identical(direct.row_products, written.row_products)
    a, b = map(wide, pair)
    assert_close(direct.row_products, (a.norm(dim=2) * b.norm(dim=2)).sum(1))
    assert_close(direct.sq_norm, oracle(*map(wide, pair))[0], tolerance=1e-6)


@pytest.mark.parametrize("shape", empty_shapes(), ids=str)
def test_empty_dims(shape):
    N, T, D, P = shape
    a, b = torch.ones(N, T, D, device=DEVICE), torch.ones(N, T, P, device=DEVICE)
    result = outer_norm(a, b, bias=True, row_products=True)
    assert torch.equal(result.sq_norm, torch.zeros(N, device=DEVICE))
    assert torch.equal(result.row_products, torch.zeros(N, device=DEVICE))
    assert torch.equal(result.bias_sq_norm, b.sum(1).square().sum(1))


def test_a_sample_is_bitwise_the_same_in_any_batch():
    a, b = (x.tensor for x in ordinary((BF16, BF16), N=5))
    whole = outer_norm(a, b, bias=True, row_products=True)
    permutation = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    permuted = outer_norm(a[permutation], b[permutation], bias=True, row_products=True)
    one = {"bias": True, "row_products": True}
    alone = [outer_norm(a[n : n + 1].clone(), b[n : n + 1].clone(), **one) for n in range(5)]
    for field, expected in whole._asdict().items():
        assert identical(getattr(permuted, field), expected[permutation])
        assert identical(torch.cat([getattr(one, field) for one in alone]), expected)
