"""Rows further apart than 2³¹ elements: every kernel must take offsets in 64 bits."""

import contextlib
import mmap
from unittest import mock

import pytest
import torch
from kernel_cases import BF16, DEVICE, assert_close, identical

from dpfast.kernels import (
    _partials,
    gram_norm,
    grouped_outer_norm,
    outer_norm,
    outer_product,
    row_sq_norm,
    weighted_sum,
)
from dpfast.kernels._rows import row_sources
from dpfast.kernels._tiles import Tile

FAR = 2**31 + 16  # elements; a multiple of 16 bytes, as descriptors need
MAP_NORESERVE = 0x4000  # Linux; `mmap` does not name it
D, P = 16, 24
TILES = [pytest.param(Tile(16, 16, 32, 16, 4, 1, "test", TMA=tma), id=name) for name, tma in (("ptr", 0), ("tma", 1))]


def far_apart(size, dtype):
    """`size` elements of which only the pages that are touched take memory."""
    if DEVICE == "cuda":
        return torch.empty(size, dtype=dtype, device=DEVICE)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype)


def spread(values, dim):
    """`values` (N, T, F), with FAR elements from one index of `dim` to the next."""
    N, T, F = values.shape
    strides = (FAR, F, 1) if dim == 0 else (F, FAR, 1) if N == 1 else (T * FAR, FAR, 1)
    x = torch.as_strided(far_apart(FAR * (values.shape[dim] - 1) + N * T * F, values.dtype), values.shape, strides)
    return x.copy_(values)


@contextlib.contextmanager
def in_place():
    """The interpreter would copy every storage onto itself after a launch, all of its pages."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    with mock.patch.object(GridExecutor, "_restore_args_dev", lambda *_: None):
        yield


@pytest.fixture(params=[(0, 2, 3), (1, 1, 2)], ids=["samples", "positions"])
def pair(request):
    """The same values packed and spread: (activations, backprops) each."""
    dim, N, T = request.param
    generator = torch.Generator().manual_seed(0)
    packed = [torch.randn(N, T, F, generator=generator).to(BF16).to(DEVICE) for F in (D, P)]
    return packed, [spread(x, dim) for x in packed]


@pytest.mark.parametrize("tile", TILES)
def test_outer_products_and_direct_norms(pair, tile):
    packed, far = pair
    assert row_sources(tile, (far[0], 16), (far[1], 32))[-1] == tile.TMA
    with in_place():
        actual = outer_product(*far, bias=True, norm=True, tile=tile)
        norm = outer_norm(*far, bias=True, tile=tile)
        products = outer_product(*far, row_products=True, tile=tile)
    for x, y in zip(actual, outer_product(*packed, bias=True, norm=True, tile=tile), strict=True):
        assert x is y is None or identical(x, y)  # row products were not asked for
    assert identical(norm.sq_norm, actual.sq_norm)
    for x, y in zip(products, outer_product(*packed, row_products=True, tile=tile), strict=True):
        assert x is y is None or identical(x, y)


@pytest.mark.parametrize("tile", TILES)
def test_gram_norms(pair, tile):
    packed, far = pair
    with in_place():
        actual = gram_norm(*far, bias=True, tile=tile)
    for x, y in zip(actual[:2], gram_norm(*packed, bias=True, tile=tile), strict=False):
        assert identical(x, y)


@pytest.mark.parametrize("tile", [*TILES, pytest.param(Tile(16, 16, 32, 0, 4, 1, "test", "flat"), id="flat")])
def test_weighted_sums(pair, tile):
    packed, far = pair
    c = torch.tensor([0.5, 0.25], device=DEVICE)[: len(packed[0])]
    with in_place():
        actual = weighted_sum(*far, c, bias=True, tile=tile)
    for x, y in zip(actual, weighted_sum(*packed, c, bias=True, tile=tile), strict=True):
        assert identical(x, y)


@pytest.mark.parametrize("launcher", [outer_norm, gram_norm, lambda a, b, **o: grouped_outer_norm([a], [b], **o)])
def test_runs_that_begin_far_away(launcher):
    packed = [torch.ones(1, 2, F, dtype=BF16, device=DEVICE).cumsum(2) for F in (D, P)]
    far = [spread(x, 1) for x in packed]
    with in_place():
        actual = launcher(*far, runs=torch.tensor([[1, 2]], device=DEVICE), longest=1)
    assert identical(actual.sq_norm, launcher(*(x[:, 1:] for x in packed)).sq_norm)


def test_norms_of_rows(pair):
    packed, far = pair
    with in_place():
        actual = row_sq_norm(far[0])
    assert identical(actual, row_sq_norm(packed[0]))


def test_parts_and_their_sums():
    """Sums that lie past 2³¹, of a sample whose number says so."""
    length, parts = 2**20, 2
    first = FAR // length + 1
    workspace = torch.zeros(parts, length, device=DEVICE)
    workspace[:, -3:] = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    out = far_apart((first + 1) * length, BF16).view(-1, length)
    with in_place():
        _partials.add_parts(workspace, parts, 0.5, out, None, first, 1, 0)
    assert_close(out[first, -3:], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
