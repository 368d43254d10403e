"""Sums of rows, of normalised rows too, and norms of rows, against fp64."""

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
from triton.backends.amd.compiler import HIPBackend

from dpfast.kernels import normalized_sum, row_norm, weighted_rows

INF, NAN = float("inf"), float("nan")


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# -- weighted rows ------------------------------------------------------------------------------------------------


@few
@given(
    B=st.integers(0, 3),
    J=st.integers(0, 40),
    K=st.integers(0, 300) | st.sampled_from([2048, 2049]),
    weighted=st.booleans(),
)
def test_sums_of_rows(B, J, K, weighted):
    x, weights = rows(B, J, K), rows(J, seed=1) if weighted else None
    out = call(weighted_rows, x, weights)
    c = torch.ones(J, dtype=torch.float64) if weights is None else wide(weights)
    assert_close(out, torch.einsum("j,bjk->bk", c, wide(x)), torch.einsum("j,bjk->bk", c.abs(), wide(x).abs()))


def test_sums_are_rounded_as_they_are_written():
    x, weights = rows(2, 20, 70), rows(20, seed=1)
    rounded, sums = call(weighted_rows, x, weights, out_dtype=BF16), weighted_rows(x, weights)
    if DEVICE == "cpu":  # the interpreter rounds towards zero
        assert rounded.dtype is BF16 and ((rounded - sums).abs() <= sums.abs() * 2.0**-7).all()
    else:
        assert identical(rounded, sums.to(BF16))
    assert weighted_rows(x[:, :0], weights[:0], out_dtype=BF16).dtype is BF16


def test_rows_of_weight_zero_are_not_read():
    x, weights = rows(2, 20, 70), rows(20, seed=1)
    weights[3] = weights[17] = 0.0
    out = weighted_rows(x, weights)
    spoilt = x.clone()
    spoilt[:, 3], spoilt[:, 17] = NAN, INF
    assert identical(weighted_rows(spoilt, weights), out)
    x[:, 3] = x[:, 17] = 0.0
    assert identical(weighted_rows(x, weights), out)


def test_a_rows_sum_is_bitwise_the_same_beside_others():
    x, weights = rows(5, 37, 130), rows(37, seed=1)
    whole = weighted_rows(x, weights)
    for b in range(5):
        assert identical(weighted_rows(x[b : b + 1].clone(), weights), whole[b : b + 1])


@pytest.mark.parametrize(
    ("x", "weights"),
    [
        (torch.ones(2, 3, 4, dtype=BF16), None),
        (torch.ones(3, 4), None),
        (torch.ones(2, 4, 3).mT, None),
        (torch.ones(2, 3, 4), torch.ones(2)),
        (torch.ones(2, 3, 4), torch.ones(3, dtype=torch.float64)),
    ],
)
def test_refuses_other_rows_and_weights(x, weights):
    with pytest.raises(ValueError, match=r"rows are|dims must be|weights are"):
        weighted_rows(x.to(DEVICE), None if weights is None else weights.to(DEVICE))


# -- normalised rows ----------------------------------------------------------------------------------------------


def exact(x, b, eps, mean):
    """(x̂, 1 / deviation, mean) in fp64."""
    m = x.mean(-1, keepdim=True) if mean else torch.zeros_like(x[..., :1])
    rstd = ((x - m).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x - m) * rstd, rstd, m


@few
@given(
    N=st.integers(0, 3),
    T=st.integers(0, 70) | st.sampled_from([257]),
    D=st.integers(1, 130) | st.sampled_from([768, 1030]),
    dtypes=st.tuples(*[st.sampled_from([BF16, FP16, FP32])] * 2),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
    mean=st.booleans(),
)
def test_normalised_rows(N, T, D, dtypes, layouts, mean):
    x, b = (Guarded(N, T, D, *kind, seed=seed) for seed, kind in enumerate(zip(dtypes, layouts, strict=True)))
    r, g, eps = 1e-6, 1e-5, 1e-3
    out = call(normalized_sum, x, b, eps=eps, mean=mean, bias=True, relative=r, added=g)
    normalized, rstd, m = exact(wide(x), wide(b), eps, mean)
    product = wide(b) * normalized
    sizes = product.norm(dim=2), wide(b).norm(dim=2)
    # Of a row that is all the same, x̂ is rounding alone: as large as the mean beside the deviation.
    loss = (m.abs() * rstd).amax(dim=2, keepdim=True)
    assert_close(out.sums, product.sum(1), (wide(b).abs() * (normalized.abs() + loss)).sum(1), 2e-6)
    assert_close(out.bias, wide(b).sum(1), wide(b).abs().sum(1))
    assert_close(out.row_norm_backprops, sizes[1])
    cancelled = 1.0 + (m * rstd).abs().squeeze(2)
    error = r * cancelled * (sizes[1] + sizes[0]) + g * sizes[0]
    assert_close(out.error, error, r * cancelled * (2 * sizes[1] + sizes[0]) + g * (sizes[0] + sizes[1]), 1e-3)


def test_rows_that_are_all_the_same_are_known_to_be_nothing():
    x, b = rows(2, 5, 70), rows(2, 5, 70, seed=1)
    x[0, 1], x[1, 2] = 3.0, 0.0
    spread = {"eps": 1e-12, "relative": 1e-6, "added": 0.0, "constant": True}
    layer = normalized_sum(x, b, mean=True, **spread)
    assert (layer.error == 0).nonzero().tolist() == [[0, 1], [1, 2]]
    rms = normalized_sum(x, b, mean=False, **spread)
    assert (rms.error == 0).nonzero().tolist() == [[1, 2]]  # the other one is a row as any other
    x[0, 1] += rows(70, seed=2)
    b[0, 1] = 0.0
    assert identical(normalized_sum(x, b, mean=True, **spread).sums, layer.sums)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("place", [0, 3, 69])
def test_a_nan_is_not_passed_over_where_all_else_is_the_same(mean, place):
    """Minimum and maximum pass over it, so the row looked constant: no gradient, and no error."""
    x, b = torch.full((2, 3, 70), 3.0 if mean else 0.0, device=DEVICE), rows(2, 3, 70)
    x[1, 1, place] = NAN
    out = normalized_sum(x, b, eps=1e-12, mean=mean, constant=True, relative=1e-6, added=0.0)
    assert (out.error == INF).nonzero().tolist() == [[1, 1]] and not out.error[out.error != INF].any()
    assert out.sums[1].isnan().all() and not out.sums[0].any()


@pytest.mark.parametrize("entry", [INF, NAN, 1e30])
def test_what_says_nothing_has_an_infinite_error(entry):
    x, b = rows(3, 4, 50), rows(3, 4, 50, seed=1)
    x[1, 2, 3] = entry
    out = normalized_sum(x, b, eps=1e-5, mean=True, relative=1e-6, added=1e-6)
    known = out.error.isfinite()
    assert known[0].all() and known[2].all() and not known[1, 2]
    tiny = normalized_sum(rows(3, 4, 50) * 1e-25, b, eps=0.0, mean=False, relative=1e-6, added=0.0, largest=1e20)
    assert (tiny.error == INF).all()  # all squares have underflowed


def test_a_sample_is_bitwise_the_same_in_any_batch():
    x, b = rows(4, 90, 200).to(BF16), rows(4, 90, 200, seed=1).to(BF16)
    options = {"eps": 1e-5, "mean": True, "bias": True, "relative": 1e-6, "added": 1e-6}
    whole = normalized_sum(x, b, **options)
    for n in range(4):
        for alone, together in zip(
            normalized_sum(x[n : n + 1].clone(), b[n : n + 1].clone(), **options), whole, strict=True
        ):
            assert identical(alone, together[n : n + 1])


def test_rows_that_are_too_wide():
    with pytest.raises(ValueError, match="rows of at most 8192 features, not 8193"):
        normalized_sum(rows(1, 1, 8193), rows(1, 1, 8193), eps=1e-5, mean=True, relative=0.0, added=0.0)


# -- norms of rows ------------------------------------------------------------------------------------------------


def test_norms_of_rows():
    x = Guarded(3, 20, 130, BF16, "padded")
    assert_close(call(row_norm, x), wide(x).norm(dim=2))
    tiny = torch.full((1, 2, 64), 1e-30, device=DEVICE)
    assert (row_norm(tiny).double() >= tiny.double().norm(dim=2)).all()  # its squares are nothing in fp32


# -- ahead of time ------------------------------------------------------------------------------------------------


def links_for_amd():
    """Triton 3.4 calls ROCm's linker, which few machines have; later ones have their own."""
    find = getattr(HIPBackend, "path_to_rocm_lld", None)
    try:
        return find is None or find() is not None
    except Exception:
        return False


ARCHES = ("sm_80", "sm_90", "sm_100", *(("gfx942",) if links_for_amd() else ()))
JOBS = [
    {"arch": arch, "kernel": kernel, "dtype": dtype, "D": D, "options": options}
    for arch in ARCHES
    for kernel, dtypes, widths in (
        ("normalized_sum", ("bfloat16", "float32"), (63, 768, 4096, 8192)),
        ("weighted_rows", ("bfloat16", "float32"), (63, 768)),
        ("row_norm", ("bfloat16",), (768,)),
        ("add_noise", ("bfloat16", "float32"), (768,)),
    )
    for dtype in dtypes
    for D in widths
    for options in (True, False)
]


@pytest.fixture(scope="module")
def reports():
    """What the compiler makes of the launches, in a process that does not interpret Triton."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("row_sums_worker.py")
    return subprocess.run(
        [sys.executable, worker], input=json.dumps(JOBS), capture_output=True, text=True, env=environment, check=True
    ).stdout.splitlines()


def test_compiles_without_a_spill(reports):
    assert len(reports) == len(JOBS)
    for line in reports:
        report = json.loads(line)
        job = {key: report[key] for key in JOBS[0]}
        assert report["spills"] == report["spill_instructions"] == 0, job
        assert contracted_sums(report["text"], "amdgcn" if report["arch"] == "gfx942" else "sass") == [], job
        assert contracted_sums(report["ptx"], "ptx") == [], job
        if report["D"] % 16 == 0 and report["arch"] != "gfx942":
            assert "LDG.E.128" in report["text"], job
