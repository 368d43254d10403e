"""gram_norm against fp64."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kernel_cases import (
    BF16,
    DEVICE,
    DTYPE_PAIRS,
    FP32,
    Guarded,
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

from dpfast.kernels import _tiles, gram_norm, row_sq_norm
from dpfast.kernels._tiles import Tile


def oracle(a, b):
    """The five sums, in the result's order."""
    gram_a, gram_b = torch.einsum("ntd,nsd->nts", a, a), torch.einsum("ntp,nsp->nts", b, b)
    norm_a, norm_b = a.norm(dim=2), b.norm(dim=2)
    return (
        (gram_a * gram_b).sum((1, 2)),
        gram_b.sum((1, 2)),
        torch.einsum("nt,ns,nts->n", norm_a, norm_a, gram_b.abs()),
        torch.einsum("nt,ns,nts->n", norm_b, norm_b, gram_a.abs()),
        (gram_a * gram_b).abs().sum((1, 2)),
    )


def row_norms(a, b):
    return {
        "row_norm_activations": row_sq_norm(a.tensor).sqrt(),
        "row_norm_backprops": row_sq_norm(b.tensor).sqrt(),
    }


@few
@given(pair=pairs(), tile=st.none() | tiles(), bias=st.booleans(), bound=st.booleans())
def test_any_shape_layout_and_tile(pair, tile, bias, bound):
    a, b = map(wide, pair)
    result = call(gram_norm, *pair, bias=bias, tile=tile, **(row_norms(*pair) if bound else {}))
    scales = oracle(a.abs(), b.abs())
    asked = (True, bias, bound, bound, bound)
    for actual, expected, scale, present in zip(result, oracle(a, b), scales, asked, strict=True):
        assert (actual is not None) == present
        if present:
            assert_close(actual, expected, scale)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_ordinary_data(dtypes):
    pair = ordinary(dtypes)
    result = call(gram_norm, *pair, bias=True, **row_norms(*pair))
    for actual, expected in zip(result, oracle(*map(wide, pair)), strict=True):
        assert_close(actual, expected, tolerance=1e-5)


def test_row_norms_of_any_strides():
    pair = ordinary((BF16, BF16))
    norms = row_norms(*pair)
    strided = {name: norm.t().contiguous().t() for name, norm in norms.items()}
    expected = call(gram_norm, *pair, bias=True, **norms)
    for x, y in zip(call(gram_norm, *pair, bias=True, **strided), expected, strict=True):
        assert identical(x, y)


def test_many_blocks_of_positions():
    """The pair's number is turned into its blocks by a rounded square root."""
    pair = ordinary((BF16, BF16), N=1, T=16 * 23 + 1, D=3, P=2)
    result = call(gram_norm, *pair, bias=True, tile=Tile(16, 0, 0, 16, 4, 2, "test"))
    expected = oracle(*map(wide, pair))
    assert_close(result.sq_norm, expected[0], tolerance=1e-5)
    assert_close(result.bias_sq_norm, expected[1], tolerance=1e-5)


@pytest.mark.parametrize("block", [16, 128])
def test_chains_of_features(block):
    """More than one chain of one operand, the last one ragged, and less than one of the other."""
    pair = ordinary((BF16, BF16), N=2, T=20, D=300, P=30)
    result = call(gram_norm, *pair, bias=True, tile=Tile(32, 0, 0, block, 4, 1, "test"), **row_norms(*pair))
    for actual, expected in zip(result, oracle(*map(wide, pair)), strict=True):
        assert_close(actual, expected, tolerance=1e-5)


@pytest.mark.parametrize("shape", empty_shapes(), ids=str)
def test_empty_dims(shape):
    N, T, D, P = shape
    a, b = torch.ones(N, T, D, device=DEVICE), torch.ones(N, T, P, device=DEVICE)
    norms = {"row_norm_activations": row_sq_norm(a).sqrt(), "row_norm_backprops": row_sq_norm(b).sqrt()}
    result = gram_norm(a, b, bias=True, **norms)
    for actual, expected in zip(result, oracle(a.double(), b.double()), strict=True):
        assert_close(actual, expected.cpu(), tolerance=1e-6)


def test_a_sample_is_bitwise_the_same_in_any_batch():
    a, b = ordinary((BF16, BF16), N=5)
    norms = row_norms(a, b)
    a, b = a.tensor, b.tensor

    def take(index):
        taken = {name: norm[index].clone() for name, norm in norms.items()}
        return gram_norm(a[index].clone(), b[index].clone(), bias=True, **taken)

    whole = gram_norm(a, b, bias=True, **norms)
    permutation = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    permuted = take(permutation)
    alone = [take(slice(n, n + 1)) for n in range(5)]
    for field, expected in whole._asdict().items():
        assert identical(getattr(permuted, field), expected[permutation])
        assert identical(torch.cat([getattr(one, field) for one in alone]), expected)


def test_refuses_the_row_norms_of_one_side():
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="both or of neither"):
        gram_norm(x, x, row_norm_activations=torch.ones(2, 3))


@pytest.mark.parametrize("norm", [torch.ones(2, 4), torch.ones(2, 3, dtype=torch.float64)])
def test_refuses_row_norms_of_another_shape_or_dtype(norm):
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="row norms are"):
        gram_norm(x, x, row_norm_activations=norm, row_norm_backprops=torch.ones(2, 3))


@pytest.mark.parametrize("D", [45, 64])
def test_positions_brought_next_to_each_other(monkeypatch, D):
    """fp32, guarded: of samples, whose copies end in zeros, and of runs, whose neighbours are not to be read."""
    monkeypatch.setattr(_tiles, "_TURNED_FROM_T", 1)
    pair = [Guarded(2, 70, F, FP32, layout, seed=F) for F, layout in ((D, "padded"), (61, "time_first"))]
    rows = [Guarded(1, 100, F, FP32, seed=F) for F in (D, 61)]
    runs = torch.tensor([[3, 70], [70, 100]], device=rows[0].tensor.device)

    def results():
        for inputs, options in ((pair, {"bias": True}), (rows, {"runs": runs, "longest": 67})):
            norms = [wide(x).norm(dim=2).float().to(runs.device) for x in inputs]
            bounded = dict(zip(("row_norm_activations", "row_norm_backprops"), norms, strict=True))
            yield from (x for x in call(gram_norm, *inputs, **bounded, **options) if x is not None)

    found = {}
    for least in (2**60, 1):
        monkeypatch.setattr(_tiles, "_TURNED_FROM", least)
        assert _tiles.turns(70, D, 61, FP32) == (least == 1)
        found[least] = list(results())
    for x, y in zip(*found.values(), strict=True):
        assert_close(x, y.cpu().double())
