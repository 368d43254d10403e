"""The lookup norm against the table's gradient written out in fp64, and what the compiler makes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kernel_cases import BF16, DEVICE, FP16, FP32, LAYOUTS, Guarded, assert_close, call, few, identical, wide
from listings import contracted_sums

from dpfast.kernels import lookup_norm
from dpfast.kernels._launch import arch_of
from dpfast.kernels._tiles import Tile
from dpfast.kernels.lookup_norm import row_tile

SMALL = Tile(4, 32, 0, 0, 4, 1, "test")


def oracle(indices, backprops, padding_idx, rows):
    """(q, s²) of the module's docstring, and ‖|b|‖ added up per row of the table, squared, in fp64."""
    b, indices = wide(backprops), indices.cpu().long()
    b = b.masked_fill((indices == (-1 if padding_idx is None else padding_idx)).unsqueeze(-1), 0.0)
    N, T, _ = b.shape
    place = (torch.arange(N)[:, None].expand(N, T), indices)

    def per_row(values):
        return torch.zeros((N, 1000, *values.shape[2:]), dtype=torch.float64).index_put(place, values, accumulate=True)

    k = per_row(torch.ones(N, T, dtype=torch.float64))
    m = (k / rows).ceil() + k.clamp(max=rows) - 2
    products = torch.where(k > 1, m.square() * k * per_row(b.square().sum(2)), 0.0).sum(1)
    return per_row(b).square().sum((1, 2)), products, per_row(b.abs()).square().sum((1, 2))


def lookups(N, T, entries, seed=3, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, entries, (N, T), generator=generator).to(DEVICE, dtype)


@few
@given(
    N=st.integers(0, 4),
    T=st.integers(0, 50),
    D=st.integers(0, 90),
    entries=st.sampled_from([1, 3, 20, 1000]),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    layout=st.sampled_from(LAYOUTS),
    index_dtype=st.sampled_from([torch.int64, torch.int32]),
    padding_idx=st.sampled_from([None, 0]),
    rows=st.sampled_from([1, 4, 8]),
)
def test_norms_and_products(N, T, D, entries, dtype, layout, index_dtype, padding_idx, rows):
    indices, backprops = lookups(N, T, entries, dtype=index_dtype), Guarded(N, T, D, dtype, layout)
    tile = Tile(rows, 32, 0, 0, 4, 1, "test")
    result = call(lookup_norm, indices, backprops, padding_idx=padding_idx, tile=tile)
    sq_norm, products, scale = oracle(indices, backprops, padding_idx, rows)
    assert_close(result.sq_norm, sq_norm, scale)
    assert_close(result.sq_products, products)
    assert result.width >= min(D, 1)


def test_a_row_looked_up_once_has_no_error():
    backprops = Guarded(3, 40, 33, FP32)
    indices = torch.stack([torch.randperm(1000)[:40] for _ in range(3)]).to(DEVICE)
    result = call(lookup_norm, indices, backprops)
    assert (result.sq_products == 0).all() and (result.sq_norm > 0).all()


def test_indices_may_have_any_strides():
    backprops, indices = Guarded(4, 30, 20, BF16), lookups(1, 30, 5).expand(4, 30)
    expected = call(lookup_norm, indices.contiguous(), backprops)
    for view in (indices, indices.t().contiguous().t()):
        assert identical(call(lookup_norm, view, backprops).sq_norm, expected.sq_norm)


def test_a_sample_has_the_same_bits_in_any_batch():
    indices, backprops = lookups(5, 60, 7), Guarded(5, 60, 70, BF16).tensor
    together = lookup_norm(indices, backprops, tile=SMALL)
    for n in range(5):
        for alone in (slice(n, n + 1), slice(n, None)):
            result = lookup_norm(indices[alone], backprops[alone], tile=SMALL)
            for one, all_ in zip(result[:2], together[:2], strict=True):
                assert identical(one[:1], all_[n : n + 1])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_stays_in_its_sample_and_padding_is_not_read(poison):
    indices, backprops = lookups(3, 20, 4), torch.randn(3, 20, 33, device=DEVICE)
    clean = lookup_norm(indices, backprops)
    spoilt = backprops.clone()
    spoilt[1, 7] = poison
    result = lookup_norm(indices, spoilt)
    assert not result.sq_norm[1].isfinite()
    assert identical(result.sq_norm[[0, 2]], clean.sq_norm[[0, 2]])
    spoilt = backprops.masked_fill((indices == 2).unsqueeze(-1), poison)
    padded = lookup_norm(indices, spoilt, padding_idx=2)
    assert identical(padded.sq_norm, lookup_norm(indices, backprops, padding_idx=2).sq_norm)


def test_one_long_run():
    backprops = Guarded(2, 500, 17, BF16)
    result = call(lookup_norm, lookups(2, 500, 1), backprops)
    rows = row_tile(17, arch_of(backprops.tensor)).BLOCK_T
    sq_norm, products, scale = oracle(lookups(2, 500, 1), backprops, None, rows)
    assert_close(result.sq_norm, sq_norm, scale)
    assert_close(result.sq_products, products, tolerance=2e-6)


@pytest.mark.parametrize(
    "indices",
    [torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int16), torch.tensor(1)],
)
def test_refuses_what_are_no_indices(indices):
    with pytest.raises(ValueError, match="indices are"):
        lookup_norm(indices.to(DEVICE), torch.ones(2, 3, 5, device=DEVICE))


# -- ahead of time ------------------------------------------------------------------------------------------------

ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDTHS = (16, 63, 300, 768, 4096)


@pytest.fixture(scope="module")
def reports():
    """What the compiler makes of the launches, in a process that does not interpret Triton."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("lookup_worker.py")
    jobs = [
        {"arch": arch, "dtype": dtype, "D": D} for arch in ARCHES for dtype in ("bfloat16", "float32") for D in WIDTHS
    ]
    lines = subprocess.run(
        [sys.executable, worker], input=json.dumps(jobs), capture_output=True, text=True, env=environment, check=True
    ).stdout.splitlines()
    return {(r["arch"], r["dtype"], r["D"]): r for r in map(json.loads, lines)}


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_without_a_spill(arch, dtype, D, reports):
    report = reports[arch, dtype, D]
    assert report["spills"] == report["spill_instructions"] == 0
    assert contracted_sums(report["text"], "amdgcn" if arch == "gfx942" else "sass") == []
    assert contracted_sums(report["ptx"], "ptx") == []
    if D % 16 == 0 and arch != "gfx942":
        assert "LDG.E.128" in report["text"] and "LDG.E.U16" not in report["text"]
