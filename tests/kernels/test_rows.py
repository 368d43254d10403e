"""Loads through tensor descriptors: where they are taken, and that they change no bit."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import BF16, FP16, FP32, Guarded, call, few, identical, tiles

from dpfast.kernels import gram_norm, outer_norm, outer_product
from dpfast.kernels._rows import row_sources
from dpfast.kernels._tiles import Tile

TILE = Tile(16, 32, 32, 16, 4, 1, "test", TMA=True)


def described(x, tile=TILE):
    return row_sources(tile, (x, 32))[-1]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_multiples_of_16_bytes_are_described(dtype):
    octet = 16 // dtype.itemsize
    assert described(torch.empty(3, 5, octet, dtype=dtype))
    assert not described(torch.empty(3, 5, octet + 1, dtype=dtype))
    assert not described(torch.empty(3, 5, octet, dtype=dtype), Tile(16, 32, 32, 16, 4, 1, "test"))


@pytest.mark.parametrize(
    ("expected", "x"),
    [
        (True, torch.empty(3, 5, 24, dtype=BF16)[:, :, :13]),  # a padded row
        (True, torch.empty(3, 7, 24, dtype=BF16)[:, 1:6]),  # positions left out
        (True, torch.empty(1, 5, 16, dtype=BF16).as_strided((1, 5, 16), (0, 16, 1))),  # one sample has no step
        (True, torch.empty(64, dtype=BF16).as_strided((3, 1, 13), (16, 0, 1))),  # nor one position
        (False, torch.empty(3, 5, 24, dtype=BF16)[:, :, 1:17]),  # starts at 2 bytes
        (False, torch.empty(1, 5, 16, dtype=BF16).expand(3, 5, 16)),  # the same sample again
        (False, torch.empty(3, 1, 16, dtype=BF16).expand(3, 5, 16)),  # the same position again
        (False, torch.empty(5, 3, 16, dtype=BF16).transpose(0, 1)),  # positions before samples
        (False, torch.empty(0, 5, 16, dtype=BF16)),
    ],
)
def test_which_layouts_are_described(expected, x):
    assert described(x) == expected


def test_both_operands_or_none():
    a, b = torch.empty(3, 5, 16, dtype=BF16), torch.empty(3, 5, 13, dtype=BF16)
    assert row_sources(TILE, (a, 32), (b, 32)) == (a, b, False)


@settings(few, max_examples=12)
@given(
    N=st.integers(1, 2),
    T=st.integers(1, 40),
    octets=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    tile=tiles(),
)
def test_the_same_bits_as_through_pointers(N, T, octets, dtype, tile):
    """Guarded inputs: what lies outside is NaN, and would show in a result."""
    pair = [Guarded(N, T, 8 * count, dtype, seed=seed) for seed, count in enumerate(octets)]
    through = {tma: Tile(*list(vars(tile).values())[:8], TMA=tma) for tma in (True, False)}
    assert row_sources(through[True], *((x.tensor, 32) for x in pair))[-1]
    for kernel, options in (
        (outer_product, {"bias": True, "norm": True}),
        (outer_norm, {"bias": True}),
        (gram_norm, {"bias": True}),
    ):
        by_descriptor, by_pointer = (call(kernel, *pair, tile=through[tma], **options) for tma in (True, False))
        for x, y in zip(by_descriptor, by_pointer, strict=True):
            assert (x is None and y is None) or identical(x, y)
            assert x is None or x.isfinite().all()
