"""Loads through tensor descriptors: where they are taken, and that they change no number."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import BF16, FP16, FP32, Guarded, assert_close, call, few, identical, same_sums, tiles, wide

from dpfast.kernels import _tiles, gram_norm, outer_norm, outer_product, weighted_sum
from dpfast.kernels._rows import brought_to_step, row_sources
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
def test_the_same_sums_as_through_pointers(N, T, octets, dtype, tile):
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
            assert (x is None) == (y is None)
            if x is not None:
                same_sums(x, y)
                assert x.isfinite().all()


@pytest.fixture
def copying(monkeypatch):
    """Rows are copied to multiples of 16 however little it saves."""
    monkeypatch.setattr(_tiles, "_COPY_FROM", 1)
    monkeypatch.setattr(_tiles, "_COPY_REUSE", 1)


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("layouts", [("contiguous", "padded"), ("time_first", "one_sample")], ids="-".join)
@pytest.mark.parametrize(("D", "P"), [(33, 61), (48, 37), (40, 24)])  # one is whole; both can be described as they are
def test_rows_that_are_copied_change_no_bit(copying, monkeypatch, D, P, layouts, tma):
    """Guarded inputs: a mask that ends at the next multiple of 16 of something else than the copy would read NaN."""
    tile = Tile(32, 32, 32, 32, 4, 1, "test", TMA=tma)
    pair = [Guarded(2, 70, F, BF16, layout, seed=F) for F, layout in zip((D, P), layouts, strict=True)]
    factors = torch.tensor([0.5, 2.0], device=pair[0].tensor.device)

    def results():
        yield from call(outer_product, *pair, bias=True, norm=True, tile=tile)[:4]
        yield from call(outer_norm, *pair, bias=True, tile=tile)[:2]
        yield from call(gram_norm, *pair, bias=True, tile=tile)[:2]
        yield from call(weighted_sum, *pair, factors, bias=True, tile=tile)

    assert all(_tiles.row_step(verb, 70, D, P, BF16) == 16 for verb in ("outer_norm", "gram_norm", "weighted_sum"))
    copied = list(results())
    monkeypatch.setattr(_tiles, "row_step", lambda *_: 1)
    for x, y in zip(copied, results(), strict=True):
        same_sums(x, y)
        assert x.isfinite().all()


def test_row_products_of_rows_that_are_copied(copying):
    pair = [Guarded(2, 70, F, BF16, seed=F) for F in (33, 61)]
    norms = [wide(x).norm(dim=2) for x in pair]
    for launcher in (outer_product, outer_norm):
        assert_close(call(launcher, *pair, row_products=True).row_products, (norms[0] * norms[1]).sum(1))


def test_runs_of_rows_that_are_copied_are_samples(copying):
    """Of every length that goes into one launch with it, bit for bit."""
    a, b = (Guarded(1, 200, F, BF16, seed=F) for F in (33, 61))
    runs = torch.tensor([[0, 70], [70, 136], [136, 200]], device=a.tensor.device)
    for launcher in (outer_norm, gram_norm):
        together = call(launcher, a, b, runs=runs, longest=70).sq_norm
        for n, (first, last) in enumerate(runs.tolist()):
            alone = launcher(a.tensor[:, first:last], b.tensor[:, first:last]).sq_norm
            assert identical(together[n : n + 1], alone)


def test_what_is_copied(copying):
    whole, odd = torch.ones(2, 3, 32, dtype=BF16), torch.ones(2, 3, 33, dtype=BF16)
    assert brought_to_step(TILE, 1, odd, odd) == (odd, odd)
    octets = torch.ones(2, 3, 24, dtype=BF16)
    assert brought_to_step(TILE, 16, octets, whole) == (octets, whole)  # a descriptor takes them as they are
    kept, copied = brought_to_step(TILE, 16, whole, odd)
    assert kept is whole
    assert copied.shape == (2, 3, 48)
    assert copied.is_contiguous()
    assert torch.equal(copied, torch.nn.functional.pad(odd, (0, 15)))
    # One cannot be described as it is, so neither is read through its descriptor, nor behind its end.
    unaligned = torch.ones(2, 3, 40, dtype=BF16)[:, :, 1:33]
    assert brought_to_step(TILE, 16, octets, unaligned)[0].shape == (2, 3, 32)
