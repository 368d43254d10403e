"""weighted_sum against fp64."""

from dataclasses import replace
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    BF16,
    DEVICE,
    DTYPE_PAIRS,
    FP16,
    FP32,
    Guarded,
    assert_close,
    call,
    empty_shapes,
    few,
    identical,
    ordinary,
    pairs,
    same_sums,
    tiles,
    wide,
)

from dpfast.kernels import _tiles, weighted_sum
from dpfast.kernels._rows import row_sources

LAYOUTS = ("per_sample", "flat")


def factors(N, seed=3):
    return torch.rand(N, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def oracle(a, b, c):
    """weight and bias."""
    return torch.einsum("n,ntp,ntd->pd", c, b, a), torch.einsum("n,ntp->p", c, b)


@few
@given(pair=pairs(), tile=st.none() | tiles(LAYOUTS), bias=st.booleans())
def test_any_shape_layout_and_tile(pair, tile, bias):
    a, b = map(wide, pair)
    c = factors(len(a)) - 0.25
    result = call(weighted_sum, *pair, c, bias=bias, tile=tile)
    weight, bias_weight = oracle(a, b, c.cpu().double())
    scale, bias_scale = oracle(a.abs(), b.abs(), c.cpu().double().abs())
    # 2⁻¹⁷ is the flat layout's split of c·b and, in fp16, of the activations.
    assert_close(result.weight, weight, scale, tolerance=2**-17)
    assert (result.bias is not None) == bias
    if bias:
        assert_close(result.bias, bias_weight, bias_scale)


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_ordinary_data(dtypes, T):
    pair = ordinary(dtypes, T=T)
    c = factors(3)
    result = call(weighted_sum, *pair, c, bias=True)
    for actual, expected in zip(result, oracle(*map(wide, pair), wide(c)), strict=True):
        assert_close(actual, expected, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("T", [2, 70])
def test_factors_far_apart_lose_nothing(dtype, T):
    """A factor below the smallest fp16 or a squared bf16 step would vanish if c·b were rounded to the input."""
    pair = ordinary((dtype, dtype), N=2, T=T)
    pair[1].tensor[1] *= 2.0**10
    pair[1].before.copy_(pair[1].buffer)
    c = torch.tensor([1 / 3, 1e-9], device=DEVICE)
    first = oracle(*(wide(x)[:1] for x in pair), wide(c)[:1])
    both = oracle(*map(wide, pair), wide(c))
    result = call(weighted_sum, *pair, c, bias=True)
    assert_close(result.weight, both[0], first[0], tolerance=1e-5)
    alone = call(weighted_sum, *pair, c * torch.tensor([0.0, 1.0], device=DEVICE), bias=True)
    assert_close(alone.weight, both[0] - first[0], tolerance=1e-5)
    assert_close(alone.bias, both[1] - first[1], tolerance=1e-5)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("T", [1, 3, 70])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("D", "P"), [(33, 17), (40, 72)])
def test_a_sample_with_factor_zero_adds_nothing(dtypes, T, D, P, poison):
    N = 5
    a, b = (x.tensor.clone() for x in ordinary(dtypes, N=N, T=T, D=D, P=P))
    c = factors(N)
    c[1] = c[3] = 0.0
    clean = weighted_sum(a, b, c, bias=True)
    a[1], b[1], a[3, -1], b[3, :, 0] = poison, poison, poison, -poison
    poisoned = weighted_sum(a, b, c, bias=True)
    assert identical(poisoned.weight, clean.weight)
    assert identical(poisoned.bias, clean.bias)
    assert not weighted_sum(a, b, torch.zeros(N, device=DEVICE)).weight.any()


@settings(few, max_examples=15)
@given(
    T=st.sampled_from([1, 15, 16, 31, 32, 33, 70]),
    octets=st.tuples(st.integers(1, 9), st.integers(1, 17)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    tile=tiles(),
    dropped=st.sets(st.integers(0, 4)),
    parts=st.integers(1, 4),
)
def test_descriptors_give_the_sums_of_pointers_and_read_nothing_of_dropped_samples(
    T, octets, dtype, tile, dropped, parts
):
    """NaN in all of the samples with factor 0 and around the buffers: also behind the last, where position T is."""
    N = 5
    pair = [Guarded(N, T, 8 * count, dtype, seed=seed) for seed, count in enumerate(octets)]
    c = factors(N) + 0.1
    for n in dropped:
        c[n] = 0.0
        for x in pair:
            x.tensor[n] = float("nan")
            x.before.copy_(x.buffer)
    through = {tma: replace(tile, TMA=tma) for tma in (True, False)}
    assert row_sources(through[True], *((x.tensor, 32) for x in pair))[-1]
    with mock.patch.object(_tiles, "splits", lambda *_: parts):
        results = {tma: call(weighted_sum, *pair, c, bias=True, tile=through[tma]) for tma in through}
    for by_descriptor, by_pointer in zip(results[True], results[False], strict=True):
        same_sums(by_descriptor, by_pointer)
        assert by_descriptor.isfinite().all()
    kept = [n for n in range(N) if n not in dropped]
    expected = oracle(*(wide(x)[kept] for x in pair), wide(c)[kept])
    for actual, each in zip(results[True], expected, strict=True):
        assert_close(actual, each, tolerance=1e-5)


def test_a_flat_step_takes_no_descriptor():
    """Its rows are of several samples; a tile that asks for descriptors all the same gets pointers."""
    pair = ordinary((BF16, BF16), T=20, D=32, P=48)
    tile = _tiles.Tile(16, 32, 32, 0, 4, 1, "test", "flat")
    asked, plain = (call(weighted_sum, *pair, factors(3), tile=replace(tile, TMA=tma)) for tma in (True, False))
    assert identical(asked.weight, plain.weight)


def test_a_poisoned_sample_with_a_factor_shows():
    a, b = (x.tensor.clone() for x in ordinary((FP32, FP32), T=3))
    a[1] = float("nan")
    assert weighted_sum(a, b, factors(3)).weight.isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_reductions(layout, monkeypatch):
    """Parts that end within a sample, and a last part that is shorter or empty."""
    pair = ordinary((BF16, BF16), N=3, T=50, D=20, P=30)
    c = factors(3)
    expected = oracle(*map(wide, pair), wide(c))
    tile = _tiles.Tile(16, 32, 32, 0, 4, 2, "test", layout)
    for parts in (1, 2, 5, 7, 12):
        monkeypatch.setattr(_tiles, "splits", lambda *_, parts=parts: parts)
        result = call(weighted_sum, *pair, c, bias=True, tile=tile)
        assert_close(result.weight, expected[0], tolerance=1e-5)
        assert_close(result.bias, expected[1], tolerance=1e-5)


def test_strided_factors():
    pair = ordinary((BF16, BF16))
    c = torch.full((3, 2), float("nan"), device=DEVICE)
    c[:, 0] = factors(3)
    assert identical(call(weighted_sum, *pair, c[:, 0]).weight, call(weighted_sum, *pair, factors(3)).weight)


@pytest.mark.parametrize("T", [3, 70])
def test_the_same_call_gives_the_same_bits(T):
    pair = ordinary((BF16, BF16), N=6, T=T)
    first, second = (call(weighted_sum, *pair, factors(6), bias=True) for _ in range(2))
    assert identical(first.weight, second.weight)
    assert identical(first.bias, second.bias)


@pytest.mark.parametrize("shape", empty_shapes(), ids=str)
def test_empty_dims(shape):
    N, T, D, P = shape
    a, b = torch.ones(N, T, D, device=DEVICE), torch.ones(N, T, P, device=DEVICE)
    c = factors(N)
    result = weighted_sum(a, b, c, bias=True)
    for actual, expected in zip(result, oracle(*map(wide, (a, b, c))), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("c", [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64)], ids=str)
def test_refuses_factors_of_another_shape_or_dtype(c):
    x = Guarded(2, 3, 4, FP32).tensor
    with pytest.raises(ValueError, match="clip_factor is"):
        weighted_sum(x, x, c)


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("parts", [1, 3])
def test_sums_in_16_bits_are_rounded_once(monkeypatch, T, parts):
    monkeypatch.setattr(_tiles, "sum_splits", lambda *_: parts)
    a, b = Guarded(4, T, 33, BF16), Guarded(4, T, 50, BF16, seed=1)
    c = torch.tensor([1.0, 0.5, 0.0, 0.3], device=DEVICE)
    exact = weighted_sum(a.tensor, b.tensor, c, bias=True)
    rounded = call(weighted_sum, a, b, c, bias=True, out_dtype=BF16)
    for found, sums in zip(rounded, exact, strict=True):
        if DEVICE == "cpu" and parts == 1:  # the interpreter rounds towards zero
            assert found.dtype == BF16 and ((found - sums).abs() <= sums.abs() * 2.0**-7).all()
        else:
            assert torch.equal(found, sums.to(BF16))
