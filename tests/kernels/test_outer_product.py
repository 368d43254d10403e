"""outer_product against fp64."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kernel_cases import (
    BF16,
    DEVICE,
    DTYPE_PAIRS,
    FP16,
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

from dpfast.kernels import _tiles, outer_product
from dpfast.kernels._tiles import Tile


def oracle(a, b):
    """grad_sample and bias_grad_sample, and each with absolute values in place of the values."""
    a, b = wide(a), wide(b)
    return (
        torch.einsum("ntp,ntd->npd", b, a),
        b.sum(1),
        torch.einsum("ntp,ntd->npd", b.abs(), a.abs()),
        b.abs().sum(1),
    )


@few
@given(pair=pairs(), tile=st.none() | tiles(), bias=st.booleans(), norm=st.booleans())
def test_any_shape_layout_and_tile(pair, tile, bias, norm):
    result = call(outer_product, *pair, bias=bias, norm=norm, tile=tile)
    G, g, G_scale, g_scale = oracle(*pair)
    assert_close(result.grad_sample, G, G_scale)
    assert (result.bias_grad_sample is not None) == bias
    assert (result.sq_norm is not None) == norm
    assert (result.bias_sq_norm is not None) == (bias and norm)
    if bias:
        assert_close(result.bias_grad_sample, g, g_scale)
    if norm:
        assert_close(result.sq_norm, G.square().sum((1, 2)), G_scale.square().sum((1, 2)))
    if bias and norm:
        assert_close(result.bias_sq_norm, g.square().sum(1), g_scale.square().sum(1))


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_ordinary_data(dtypes):
    pair = ordinary(dtypes)
    G, g, _, _ = oracle(*pair)
    result = call(outer_product, *pair, bias=True, norm=True)
    assert_close(result.grad_sample, G, tolerance=1e-5)
    assert_close(result.bias_grad_sample, g, tolerance=1e-5)
    assert_close(result.sq_norm, G.square().sum((1, 2)), tolerance=1e-5)
    assert_close(result.bias_sq_norm, g.square().sum(1), tolerance=1e-5)


@pytest.mark.parametrize(("out_dtype", "tolerance"), [(BF16, 2**-8), (FP16, 2**-11), (FP32, 1e-6)])
def test_output_dtype_rounds_the_gradient_once_and_the_norm_not_at_all(out_dtype, tolerance):
    pair = ordinary((BF16, BF16))
    G, g, _, _ = oracle(*pair)
    result = call(outer_product, *pair, bias=True, norm=True, out_dtype=out_dtype)
    assert result.grad_sample.dtype == result.bias_grad_sample.dtype == out_dtype
    assert_close(result.grad_sample, G, tolerance=tolerance)
    assert_close(result.bias_grad_sample, g, tolerance=tolerance)
    assert_close(result.sq_norm, G.square().sum((1, 2)))


def test_scale_applies_to_all_that_is_returned():
    pair = ordinary((BF16, BF16))
    G, g, _, _ = oracle(*pair)
    result = call(outer_product, *pair, bias=True, norm=True, scale=7.0)
    assert_close(result.grad_sample, 7.0 * G, tolerance=1e-5)
    assert_close(result.bias_grad_sample, 7.0 * g, tolerance=1e-5)
    assert_close(result.sq_norm, 49.0 * G.square().sum((1, 2)), tolerance=1e-5)
    assert_close(result.bias_sq_norm, 49.0 * g.square().sum(1), tolerance=1e-5)


@pytest.mark.parametrize("shape", empty_shapes(), ids=str)
def test_empty_dims(shape):
    N, T, D, P = shape
    a, b = torch.ones(N, T, D, device=DEVICE), torch.ones(N, T, P, device=DEVICE)
    result = outer_product(a, b, bias=True, norm=True)
    assert torch.equal(result.grad_sample, torch.zeros(N, P, D, device=DEVICE))
    assert torch.equal(result.bias_grad_sample, b.sum(1))
    assert torch.equal(result.sq_norm, torch.zeros(N, device=DEVICE))
    assert torch.equal(result.bias_sq_norm, b.sum(1).square().sum(1))


def test_a_sample_is_bitwise_the_same_in_any_batch():
    a, b = (x.tensor for x in ordinary((BF16, BF16), N=5))
    options = {"bias": True, "norm": True, "row_products": True}
    whole = outer_product(a, b, **options)
    permutation = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    permuted = outer_product(a[permutation], b[permutation], **options)
    alone = [outer_product(a[n : n + 1].clone(), b[n : n + 1].clone(), **options) for n in range(5)]
    for field, expected in whole._asdict().items():
        assert identical(getattr(permuted, field), expected[permutation])
        assert identical(torch.cat([getattr(one, field) for one in alone]), expected)


LONG = Tile(32, 64, 64, 0, 4, 1, "test", PART=128, TMA=True)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_positions_in_parts(dtype):
    """Two parts, the last one shorter and ragged; samples in groups that fill the workspace, the last group smaller."""
    pair = ordinary((dtype, dtype), N=3, T=300, D=40, P=72)
    assert _tiles.split(LONG, 300, 40, 72, "interpreter") == (2, 256)
    G, g, _, _ = oracle(*pair)
    options = {"bias": True, "norm": True, "row_products": True, "scale": 3.0, "tile": LONG}
    result = call(outer_product, *pair, **options)
    assert_close(result.grad_sample, 3.0 * G, tolerance=1e-6)
    assert_close(result.bias_grad_sample, 3.0 * g, tolerance=1e-6)
    assert_close(result.sq_norm, 9.0 * G.square().sum((1, 2)), tolerance=1e-6)
    assert_close(result.bias_sq_norm, 9.0 * g.square().sum(1), tolerance=1e-6)
    with mock.patch.object(_tiles, "WORKSPACE_BYTES", 4 * 2 * (2 * 72 * 41)):
        in_groups = call(outer_product, *pair, **options)
    alone = [outer_product(*(x.tensor[n : n + 1].clone() for x in pair), **options) for n in range(3)]
    for field, expected in result._asdict().items():
        assert identical(getattr(in_groups, field), expected)
        assert identical(torch.cat([getattr(one, field) for one in alone]), expected)


def test_chains_of_positions():
    """More than one chain, the last one ragged, and no parts."""
    pair = ordinary((BF16, BF16), N=1, T=300, D=16, P=20)
    G, g, _, _ = oracle(*pair)
    for block in (16, 128):
        result = call(outer_product, *pair, bias=True, tile=Tile(block, 16, 32, 0, 4, 1, "test"))
        assert_close(result.grad_sample, G, tolerance=1e-6)
        assert_close(result.bias_grad_sample, g, tolerance=1e-6)


def test_refuses_different_batches():
    with pytest.raises(ValueError, match="N and T differ"):
        outer_product(torch.ones(2, 3, 4), torch.ones(2, 2, 4))
