"""The verbs: both backends against fp64, the custom ops' contract, the choice of backend, bad input."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dpfast.arithmetic import backends, ops
from dpfast.errors import BackendError, DpfastError, InputError
from dpfast.testing import relative_error

BACKENDS = ["reference", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ordinary(*shape, seed, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(DEVICE, dtype)


@st.composite
def inputs(draw):
    """2-D to 4-D inputs with 0 to 5 samples and up to 70 positions."""
    n = draw(st.integers(0, 5))
    middle = draw(
        st.one_of(st.just(()), st.tuples(st.integers(0, 70)), st.tuples(st.integers(0, 8), st.integers(0, 8)))
    )
    widths = draw(st.integers(1, 130)), draw(st.integers(1, 130))
    dtypes = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    return tuple(ordinary(n, *middle, w, seed=i, dtype=t) for i, (w, t) in enumerate(zip(widths, dtypes, strict=True)))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(inputs())
@pytest.mark.parametrize("backend", BACKENDS)
def test_verbs_equal_fp64(backend, pair):
    a, b = pair
    rows_a, rows_b = (x.double().reshape(x.shape[0], -1 if x.numel() else 0, x.shape[-1]) for x in pair)
    exact = torch.einsum("ntp,ntd->npd", rows_b, rows_a)
    weight, bias = ops.grad_sample(a, b, bias=True, scale=2.0, backend=backend)
    assert weight.dtype == bias.dtype == torch.float32
    assert relative_error(weight, 2.0 * exact) <= 1e-5
    assert relative_error(bias, 2.0 * rows_b.sum(1)) <= 1e-5
    norms = exact.flatten(1).norm(dim=1)
    ways = ["auto", "direct", "gram"] + (["rank_one"] if rows_a.shape[1] == 1 else [])
    for way in ways:
        assert relative_error(ops.norm_sample(a, b, way=way, backend=backend), norms) <= 1e-5, way
        certified = ops.certified_sq_norm(a, b, way=way, backend=backend)
        assert (certified.upper.sqrt() >= norms).all(), way
    assert relative_error(ops.sq_norm(a, b, backend=backend), norms.square()) <= 1e-5
    c = torch.rand(a.shape[0], device=DEVICE)
    summed, summed_bias = ops.weighted_sum(a, b, c, bias=True, backend=backend)
    assert relative_error(summed, torch.einsum("n,npd->pd", c.double(), exact)) <= 1e-5
    assert relative_error(summed_bias, torch.einsum("n,ntp->p", c.double(), rows_b)) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    a, b = ordinary(3, 4, 5, seed=0), ordinary(3, 4, 6, seed=1, dtype=torch.bfloat16)
    for bias in (False, True):
        torch.library.opcheck(torch.ops.dpfast.grad_sample, (a, b, bias, 2.0, torch.float32, backend))
        torch.library.opcheck(torch.ops.dpfast.weighted_sum, (a, b, torch.rand(3, device=DEVICE), bias, backend))
    for way in ("direct", "gram"):
        torch.library.opcheck(torch.ops.dpfast.sq_norm, (a, b, way, backend))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_of_one_launch_are_apart(backend, keep, monkeypatch):
    """Also under modes that do not know views as such: a graph's first run, and inference."""
    monkeypatch.setenv("DPFAST_BACKEND", backend)
    a, b = ordinary(3, 40, 5, seed=0), ordinary(3, 40, 66, seed=1)
    torch.library.opcheck(torch.ops.dpfast.directs, ([a, a + 1.0], [b, 2.0 * b], keep))
    with torch.inference_mode():
        found = torch.ops.dpfast.directs([a, a + 1.0], [b, 2.0 * b], keep)
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found) == (8 if keep else 6)


def test_no_samples_in_a_graph():
    a, b = ordinary(0, 4, 5, seed=0), ordinary(0, 4, 6, seed=1)
    assert torch.compile(ops.sq_norm, backend="aot_eager")(a, b).shape == (0,)


@pytest.mark.parametrize("t", [20, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_that_overlap_beside_another_dtype(backend, dtype, t):
    """A converted copy does not keep the last stride where strides tie: norms came out too small."""
    a = ordinary(2, t + 69, seed=0, dtype=torch.bfloat16).unfold(1, 70, 1)
    b = ordinary(2, t, 66, seed=1, dtype=dtype)
    exact = torch.einsum("ntp,ntd->npd", b.double(), a.double())
    assert relative_error(ops.grad_sample(a, b, backend=backend), exact) <= 1e-5
    assert relative_error(ops.weighted_sum(a, b, torch.ones(2, device=DEVICE), backend=backend), exact.sum(0)) <= 1e-5
    for way in ("direct", "gram"):
        upper = ops.certified_sq_norm(a, b, way=way, backend=backend).upper.sqrt()
        assert (upper >= exact.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_in_another_order(backend):
    a, b = ordinary(0, 8, 4, seed=0).transpose(1, 2), ordinary(0, 6, 4, seed=1).transpose(1, 2)
    assert ops.grad_sample(a, b, backend=backend).shape == (0, 6, 8)
    assert not ops.weighted_sum(a, b, torch.ones(0, device=DEVICE), backend=backend).any()
    assert ops.certified_sq_norm(a, b, way="direct", backend=backend).upper.shape == (0,)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_ops_compile_into_one_graph(backend, monkeypatch):
    """Whether kernels can run is asked then too, and not traced."""
    monkeypatch.setenv("DPFAST_BACKEND", backend)

    def norms(a, b):
        return ops.norm_sample(a, b) + ops.weighted_sum(a, b, torch.ones(3, device=a.device)).sum()

    a, b = ordinary(3, 4, 5, seed=0), ordinary(3, 4, 6, seed=1)
    compiled = torch.compile(norms, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), norms(a, b))


def test_arithmetic_is_exact_under_autocast():
    a, b = ordinary(3, 40, 50, seed=0), ordinary(3, 40, 60, seed=1)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = ops.grad_sample(a, b), ops.norm_sample(a, b), ops.weighted_sum(a, b, torch.ones(3, device=DEVICE))
    expected = ops.grad_sample(a, b), ops.norm_sample(a, b), ops.weighted_sum(a, b, torch.ones(3, device=DEVICE))
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def test_output_dtype():
    a, b = ordinary(3, 4, 5, seed=0), ordinary(3, 4, 6, seed=1)
    assert ops.grad_sample(a, b, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert ops.grad_sample(a.double(), b).dtype == torch.float64
    assert ops.sq_norm(a.double(), b).dtype == torch.float64


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(2, 3, 4), torch.ones(2, 5, 4), ["(2, 3, 4)", "(2, 5, 4)", "N"]),
        (torch.ones(2, 4), torch.ones(3, 4), ["(2, 4)", "(3, 4)"]),
        (torch.ones(4), torch.ones(4), ["(4,)"]),
        (torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4), ["int64", "bfloat16"]),
        (torch.ones(2, 4, device="meta"), torch.ones(2, 4, device="cpu"), ["meta", "cpu"]),
    ],
)
def test_bad_input_names_both_shapes(a, b, words):
    for verb in (ops.grad_sample, ops.sq_norm, ops.norm_sample, lambda a, b: ops.weighted_sum(a, b, torch.ones(2))):
        with pytest.raises(InputError) as error:
            verb(a, b)
        assert isinstance(error.value, (DpfastError, ValueError))
        assert all(word in str(error.value) for word in words)


def test_bad_coefficients_and_ways():
    a = torch.ones(2, 3, 4)
    for c in (torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.long)):
        with pytest.raises(InputError, match="coefficients"):
            ops.weighted_sum(a, a, c)
    with pytest.raises(InputError, match="T = 3"):
        ops.sq_norm(a, a, way="rank_one")
    with pytest.raises(InputError, match="does not exist"):
        ops.sq_norm(a, a, way="fast")


def test_unknown_backend():
    with pytest.raises(BackendError, match="'cuda' is not one of 'auto', 'triton', 'reference'"):
        ops.sq_norm(torch.ones(2, 3), torch.ones(2, 3), backend="cuda")


def test_environment_overrides_auto(monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", "nonsense")
    with pytest.raises(BackendError, match="DPFAST_BACKEND='nonsense'"):
        ops.sq_norm(torch.ones(2, 3), torch.ones(2, 3))
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    assert backends.choose_backend("auto", torch.device(DEVICE)) == "triton"
    assert backends.choose_backend("reference", torch.device(DEVICE)) == "reference"
    assert backends.backend_report(torch.device(DEVICE)) == ("triton", "DPFAST_BACKEND says so")


def test_triton_refuses_what_it_cannot_do():
    with pytest.raises(BackendError, match="fp64"):
        ops.sq_norm(torch.ones(2, 3).double(), torch.ones(2, 3), backend="triton")
    code = (
        "import torch, dpfast\n"
        "try: dpfast.ops.sq_norm(torch.ones(2, 3), torch.ones(2, 3), backend='triton')\n"
        "except dpfast.DpfastError as e: print(e)\n"
        "print(dpfast.ops.sq_norm(torch.ones(2, 3), torch.ones(2, 3)).tolist())\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert "no CPU backend" in out and "backend='auto'" in out
    assert "[8.99" in out or "[9.0" in out
