"""grouped_outer_norm against fp64, and against itself in other groups and batches."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kernel_cases import (
    BF16,
    DEVICE,
    DTYPE_PAIRS,
    LAYOUTS,
    Guarded,
    assert_close,
    few,
    guarded_outputs,
    identical,
    wide,
)
from listings import contracted_sums

from dpfast.kernels import grouped_norm, grouped_outer_norm
from dpfast.kernels._tiles import Tile


def factors(G, N, T, D, P, dtypes=(BF16, BF16), layouts=("contiguous", "contiguous")):
    a = [Guarded(N, T, D, dtypes[0], layouts[0], seed=2 * g) for g in range(G)]
    b = [Guarded(N, T, P, dtypes[1], layouts[1], seed=2 * g + 1) for g in range(G)]
    return a, b


def call(a, b, **options):
    with guarded_outputs():
        result = grouped_outer_norm([x.tensor for x in a], [x.tensor for x in b], **options)
    for x in (*a, *b):
        x.check()
    return result


def check(a, b, result):
    """Against fp64; `sq_products` lies between Σ over tiles of what it bounds and (Σ_t ‖a_t‖‖b_t‖)²."""
    for g, (x, y) in enumerate(zip(map(wide, a), map(wide, b), strict=True)):
        G, scale = torch.einsum("ntp,ntd->npd", y, x), torch.einsum("ntp,ntd->npd", y.abs(), x.abs())
        assert_close(result.sq_norm[g], G.square().sum((1, 2)), scale.square().sum((1, 2)))
        if result.grad_sample is not None:
            assert_close(result.grad_sample[g], G, scale)
        s = (x.norm(dim=2) * y.norm(dim=2)).sum(1)
        assert (result.sq_products[g].cpu().double() <= (1.001 * s).square() + 1e-30).all()
        assert (result.sq_products[g].cpu().double() >= 0.999 * G.square().sum((1, 2))).all()


@few
@given(data=st.data())
def test_any_shape_layout_tile_and_size_of_the_group(data):
    G, N, T = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4)), data.draw(st.integers(0, 40))
    thin, wide_ = data.draw(st.integers(1, 20)), data.draw(st.integers(20, 150))
    D, P = data.draw(st.sampled_from([(wide_, thin), (thin, wide_)]))
    dtypes = data.draw(st.sampled_from(DTYPE_PAIRS))
    layouts = data.draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)))
    blocks = st.builds(
        Tile,
        BLOCK_T=st.sampled_from([16, 32]),
        BLOCK_D=st.sampled_from([16, 64]),
        BLOCK_P=st.sampled_from([32, 64]),
        BLOCK_K=st.just(0),
        num_warps=st.just(4),
        num_stages=st.just(2),
        source=st.just("test"),
    )
    a, b = factors(G, N, T, D, P, dtypes, layouts)
    result = call(a, b, keep=data.draw(st.booleans()), tile=data.draw(st.none() | blocks))
    check(a, b, result)


@pytest.mark.parametrize("sizes", [(96, 8), (8, 96), (64, 64), (17, 33)], ids=str)
def test_a_factor_is_bitwise_the_same_in_any_group_and_any_batch(sizes):
    a, b = ([x.tensor for x in xs] for xs in factors(4, 5, 70, *sizes))
    whole = grouped_outer_norm(a, b, keep=True)
    order = [3, 0, 2, 1]
    regrouped = grouped_outer_norm([a[g] for g in order], [b[g] for g in order], keep=True)
    for g in range(4):
        alone = grouped_outer_norm(a[g : g + 1], b[g : g + 1])
        sample = grouped_outer_norm([a[g][2:3].clone()], [b[g][2:3].clone()], keep=True)
        for field in ("sq_norm", "sq_products"):
            expected = getattr(whole, field)[g]
            assert identical(getattr(regrouped, field)[order.index(g)], expected)
            assert identical(getattr(alone, field)[0], expected)
            assert identical(getattr(sample, field)[0], expected[2:3])
        assert identical(regrouped.grad_sample[order.index(g)], whole.grad_sample[g])
        assert identical(sample.grad_sample[0], whole.grad_sample[g][2:3])


def test_more_factors_than_one_launch_takes():
    G = grouped_norm.largest_group("sm_90") + 3
    a, b = factors(G, 2, 9, 40, 4)
    result = call(a, b, keep=True)
    assert result.sq_norm.shape == (G, 2)
    check(a, b, result)


@pytest.mark.parametrize("G", [1, 2, 32])
def test_launches_do_not_grow_with_the_group(G, monkeypatch):
    launches = []
    monkeypatch.setattr(grouped_norm, "launch", lambda kernel, programs, *_, **__: launches.append(programs))
    monkeypatch.setattr(grouped_norm, "sum_partials", lambda partials, length: partials.view(-1, 2, length).sum(2).T)
    a, b = ([torch.zeros(2, 9, size)] * G for size in (130, 8))
    grouped_outer_norm(a, b)
    assert launches == [G * 2 * 3]


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)], ids=str)
def test_empty_dims(shape):
    N, T, D, P = shape
    a, b = [torch.ones(N, T, D, device=DEVICE)] * 2, [torch.ones(N, T, P, device=DEVICE)] * 2
    result = grouped_outer_norm(a, b, keep=True)
    assert torch.equal(result.sq_norm, torch.zeros(2, N, device=DEVICE))
    assert torch.equal(result.sq_products, torch.zeros(2, N, device=DEVICE))
    assert torch.equal(result.grad_sample, torch.zeros(2, N, P, D, device=DEVICE))


def test_row_norms_do_not_underflow():
    """1e-25² is 0 in fp32, but the products of such rows with rows of 1e25 are not small."""
    a, b = torch.full((1, 20, 80), 1e-25, device=DEVICE), torch.full((1, 20, 4), 1e18, device=DEVICE)
    s = math.sqrt(grouped_outer_norm([a], [b]).sq_products.item())
    assert s >= 20 * 80**0.5 * 1e-25 * 2 * 1e18


def test_offsets_past_two_to_the_31():
    """Only the pages that are written to take memory."""
    buffer = torch.empty(3 * 2**30, dtype=BF16, device=DEVICE)

    def far(F, start):
        view = torch.as_strided(buffer, (2, 20, F), (2**31 + 64, 2**25 + 8, 1), start)
        return view.copy_(torch.randn(2, 20, F, generator=torch.Generator().manual_seed(start)))

    a, b = [far(40, 0), far(40, 4096)], [far(8, 2 * 4096), far(8, 3 * 4096)]
    result = grouped_outer_norm(a, b, keep=True)
    for g in range(2):
        G = torch.einsum("ntp,ntd->npd", wide(b[g]), wide(a[g]))
        assert_close(result.grad_sample[g], G, tolerance=1e-5)
        assert_close(result.sq_norm[g], G.square().sum((1, 2)), tolerance=1e-5)


def test_refuses_what_is_no_group():
    a, b = torch.ones(2, 3, 40), torch.ones(2, 3, 4)
    for activations, backprops in (([], []), ([a], []), ([a, a[:1]], [b, b[:1]]), ([a, a.half()], [b, b.half()])):
        with pytest.raises(ValueError, match="group"):
            grouped_outer_norm(activations, backprops)
    with pytest.raises(ValueError, match="does not cover"):
        grouped_outer_norm([a], [a], tile=Tile(16, 64, 16, 0, 4, 1, "test"))


def test_thin_factors_of_ordinary_length_are_for_this_kernel():
    assert all(grouped_norm.groups(1024, *sizes) for sizes in ((4096, 8), (8, 4096), (64, 64), (1, 1)))
    assert not grouped_norm.groups(1024, 4096, 65)
    assert not grouped_norm.groups(0, 4096, 8)
    assert not grouped_norm.groups(12544, 147, 64), "few programs walk long: T is better split"


# -- ahead of time ------------------------------------------------------------------------------------------------

TENSOR_CORES = {"sm_80": r"\bHMMA", "sm_90": r"\bHGMMA", "sm_100": r"\bUTC\w*MMA", "gfx942": r"\bv_mfma"}
SIZES = [(4096, 8), (32, 4096), (4096, 64), (4095, 33)]
LAUNCHES = [(sizes, dtype, False) for sizes in SIZES for dtype in ("bfloat16", "float32")]
LAUNCHES += [((32, 4096), "bfloat16", True)]  # units that are runs of rows


@pytest.fixture(scope="module")
def reports():
    """What the compiler makes of the launches, in a process that does not interpret Triton."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("grouped_worker.py")
    jobs = [
        {"arch": arch, "dtype": dtype, "D": D, "P": P, "runs": runs}
        for arch in TENSOR_CORES
        for (D, P), dtype, runs in LAUNCHES
    ]
    lines = subprocess.run(
        [sys.executable, worker], input=json.dumps(jobs), capture_output=True, text=True, env=environment, check=True
    ).stdout.splitlines()
    return {(r["arch"], (r["D"], r["P"]), r["dtype"], r["runs"]): r for r in map(json.loads, lines)}


@pytest.mark.parametrize(("sizes", "dtype", "runs"), LAUNCHES, ids=str)
@pytest.mark.parametrize("arch", TENSOR_CORES)
def test_compiles_without_a_spill(arch, sizes, dtype, runs, reports):
    report = reports[arch, sizes, dtype, runs]
    assert report["spills"] == report["spill_instructions"] == 0
    assert contracted_sums(report["text"], "amdgcn" if arch == "gfx942" else "sass") == []
    assert report["shared_memory"] <= (64 if arch == "gfx942" else 99) * 1024
    if dtype == "bfloat16":
        assert re.search(TENSOR_CORES[arch], report["text"])
    # The dot starts from zero each time: the compiler has not made it one chain over T.
    assert re.search(r"math\.fma", report["ttgir"])
    if max(size % 8 for size in sizes) == 0:
        loads = re.findall(r"\b(?:LDGSTS|LDG|global_load)\S*", report["text"])
        assert any(re.search(r"128|dwordx4", load) for load in loads)
        assert not any(re.search(r"U16|ushort", load) for load in loads), "loads element by element"
