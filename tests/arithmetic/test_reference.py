"""The einsum path against fp64, and the batch invariance that its loops are built for."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dpfast.arithmetic import bounds, finishing, products, reference, reference_norms, sums
from dpfast.testing import relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
some = settings(derandomize=True, deadline=None, max_examples=150)


def ordinary(*shape, seed, dtype=torch.float32):
    """Data whose sums do not cancel, so that a relative error means something."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


@st.composite
def layouts(draw):
    """(activations, backprops) of any layout: contiguous, a slice, transposed, expanded."""
    n, t = draw(st.integers(0, 5)), draw(st.integers(0, 70))
    d, p = draw(st.integers(1, 130)), draw(st.integers(1, 130))
    seed = draw(st.integers(0, 99))
    return tuple(_laid_out(draw, n, t, width, seed + i) for i, width in enumerate((d, p)))


def _laid_out(draw, n, t, width, seed):
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["contiguous", "time_first", "slice", "expanded", "strided"]))
    if kind == "time_first":
        return ordinary(t, n, width, seed=seed, dtype=dtype).transpose(0, 1)
    if kind == "slice":
        return ordinary(n, t + 2, width + 3, seed=seed, dtype=dtype)[:, 1 : t + 1, 2 : width + 2]
    if kind == "expanded":
        return ordinary(n, 1, width, seed=seed, dtype=dtype).expand(n, t, width)
    if kind == "strided":
        return ordinary(n, t, 2 * width, seed=seed, dtype=dtype)[..., ::2]
    return ordinary(n, t, width, seed=seed, dtype=dtype)


def exact_grad_sample(a, b):
    return torch.einsum("ntp,ntd->npd", b.double(), a.double())


@some
@given(layouts())
def test_grad_sample_equals_fp64(inputs):
    a, b = inputs
    before = a.clone(), b.clone()
    got, exact = reference.grad_sample(a, b), exact_grad_sample(a, b)
    assert got.dtype == (torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32)
    assert got.shape == exact.shape
    assert relative_error(got, exact) <= 1e-5
    assert relative_error(reference.grad_sample(a, b, scale=3.0), 3.0 * exact) <= 1e-5
    assert relative_error(reference.bias_grad_sample(b, scale=3.0), 3.0 * b.double().sum(1)) <= 1e-5
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


@some
@given(layouts())
def test_norms_equal_fp64_and_bounds_hold(inputs):
    a, b = inputs
    exact = exact_grad_sample(a, b).flatten(1).norm(dim=1)
    ways = [reference_norms.direct_sq_norm, reference_norms.gram_sq_norm]
    if a.shape[1] == 1:
        ways.append(reference_norms.rank_one_sq_norm)
    for way in ways:
        norm = way(a, b)
        assert norm.value.shape == norm.upper.shape == exact.shape
        assert relative_error(norm.value.sqrt(), exact) <= 1e-5, way.__name__
        assert (norm.upper.sqrt() >= exact).all(), way.__name__
        if way is reference_norms.direct_sq_norm:
            assert (norm.upper.sqrt() <= exact * 1.001 + 1e-12).all()


@some
@given(layouts(), st.integers(0, 99))
def test_weighted_sum_equals_fp64(inputs, seed):
    a, b = inputs
    c = torch.rand(a.shape[0], generator=torch.Generator().manual_seed(seed))
    exact = torch.einsum("n,ntp,ntd->pd", c.double(), b.double(), a.double())
    assert relative_error(reference.weighted_sum(a, b, c), exact) <= 1e-5
    exact_bias = torch.einsum("n,ntp->p", c.double(), b.double())
    assert relative_error(reference.weighted_bias_sum(b, c), exact_bias) <= 1e-5


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["activations", "backprops"])
def test_a_dropped_sample_adds_exactly_nothing(where, poison):
    a, b = ordinary(3, 4, 5, seed=0), ordinary(3, 4, 6, seed=1)
    c = torch.tensor([0.5, 0.0, 2.0])
    clean = reference.weighted_sum(a, b, c)
    (a if where == "activations" else b)[1] = poison
    assert torch.equal(reference.weighted_sum(a, b, c), clean)
    values = ordinary(3, 7, seed=2)
    values[1] = poison
    assert torch.equal(reference.weighted_rows([values], c), torch.mv(values[[0, 2]].mT, c[[0, 2]]))


@pytest.mark.on_cpu
@pytest.mark.parametrize("t", [1, 2, 7, 33, 70, 300])
@pytest.mark.parametrize(("d", "p"), [(1, 1), (3, 5), (17, 5), (64, 33), (130, 8), (2100, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_samples_numbers_do_not_depend_on_its_batch(t, d, p, dtype):
    a, b = ordinary(5, t, d, seed=0, dtype=dtype), ordinary(5, t, p, seed=1, dtype=dtype)
    order = torch.tensor([3, 0, 4, 1, 2])
    verbs = {
        "grad_sample": reference.grad_sample,
        "bias": lambda a, b: reference.bias_grad_sample(b),
        "direct": lambda a, b: torch.stack(reference_norms.direct_sq_norm(a, b), 1),
        "gram": lambda a, b: torch.stack(reference_norms.gram_sq_norm(a, b), 1),
        "dense": lambda a, b: torch.stack(finishing.dense_sq_norm([b]), 1),
    }
    if t == 1:
        verbs["rank_one"] = lambda a, b: torch.stack(reference_norms.rank_one_sq_norm(a, b), 1)
    for name, verb in verbs.items():
        together = verb(a, b)
        assert torch.equal(verb(a[order], b[order]), together[order]), name
        for n in range(5):
            assert torch.equal(verb(a[n : n + 1], b[n : n + 1])[0], together[n]), name
            assert torch.equal(verb(a[n : n + 1].clone(), b[n : n + 1].clone())[0], together[n]), name


def test_norms_stay_within_the_workspace(monkeypatch):
    a, b = ordinary(6, 40, 33, seed=0), ordinary(6, 40, 29, seed=1)
    whole = reference_norms.direct_sq_norm(a, b).value, reference_norms.gram_sq_norm(a, b).value
    largest = 0
    original = products.batched

    def watched(x, y, **kwargs):
        nonlocal largest
        out = original(x, y, **kwargs)
        largest = max(largest, out.numel() * out.element_size())
        return out

    monkeypatch.setattr(products, "batched", watched)
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 2000)
    monkeypatch.setattr(bounds, "GRAM_TILE", 16)
    assert torch.equal(reference_norms.direct_sq_norm(a, b).value, whole[0]) or torch.allclose(
        reference_norms.direct_sq_norm(a, b).value, whole[0], rtol=1e-6
    )
    assert largest <= 2000
    assert torch.allclose(reference_norms.gram_sq_norm(a, b).value, whole[1], rtol=1e-6)
    assert largest <= 2000


def test_long_sums_of_squares():
    x = ordinary(3, 5000, seed=0)
    assert relative_error(sums.row_sq_norm(x), x.double().square().sum(1)) <= 1e-6
    many = torch.rand(2, 3_000_000, dtype=torch.float64)
    assert torch.allclose(sums.sum_blocks(many), many.sum(1), rtol=1e-12)
