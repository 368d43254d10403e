"""Factors: the three verbs of each against the gradients written out in fp64, and their sums."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from standing_for import assert_stands_for, ordinary

from dpfast.arithmetic import reference
from dpfast.factors import Dense, Lookup, OuterProduct, row_sum, stacked
from dpfast.factors.merge import Tied, merge
from dpfast.factors.stacked import sq_norms
from dpfast.testing import relative_error

some = settings(derandomize=True, deadline=None, max_examples=80)


def exact_lookup(indices, backprops, rows, padding_idx):
    n = indices.shape[0]
    out = torch.zeros(n, rows, backprops.shape[-1], dtype=torch.float64)
    for i, b, g in zip(indices, backprops, out, strict=True):
        for index, row in zip(i.flatten().tolist(), b.double().reshape(-1, b.shape[-1]), strict=True):
            if index != padding_idx:
                g[index] += row
    return out


@some
@given(st.integers(0, 5), st.integers(0, 40), st.integers(1, 70), st.integers(1, 70))
def test_outer_product(n, t, d, p):
    a, b = ordinary(n, t, d, seed=0), ordinary(n, t, p, seed=1)
    assert_stands_for(OuterProduct(a, b), torch.einsum("ntp,ntd->npd", b.double(), a.double()))
    assert_stands_for(row_sum(b), b.double().sum(1))
    assert_stands_for(row_sum(b.unsqueeze(1)), b.double().sum(1))


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "p", "sizes"), [(200, 300, [4, 4, 1]), (520, 700, [1] * 9), (100, 100, None)])
def test_large_gradients_are_kept_in_blocks(monkeypatch, one_thread, dtype, d, p, sizes):
    monkeypatch.setattr(reference, "KEPT_BLOCK", 2**20)  # a block a thread
    a, b = (ordinary(9, 600, width, seed=seed).to(dtype) for seed, width in enumerate((d, p)))
    before = a.clone(), b.clone()
    factor = OuterProduct(a, b)
    if sizes and dtype == torch.float64:
        sizes = [2] * 4 + [1] if d == 200 else sizes
    exact = torch.einsum("ntp,ntd->npd", b.double(), a.double())
    assert_stands_for(factor, exact)
    kept = factor.kept()
    assert [len(v) for v in getattr(kept, "blocks", ())] == (sizes or [])
    for n in (0, 5, 8):
        alone = OuterProduct(a[n : n + 1], b[n : n + 1]).kept()
        assert torch.equal(alone.materialize()[0], kept.materialize()[n])
        assert torch.equal(alone.sq_norm().upper[0], kept.sq_norm().upper[n])
    a[3], c = float("inf"), torch.ones(9)
    c[3] = 0.0
    spoilt = OuterProduct(a, b).kept()
    assert not spoilt.sq_norm().upper[3].isfinite() and spoilt.sq_norm().upper[4] == kept.sq_norm().upper[4]
    assert torch.equal(spoilt.weighted_sum(c), kept.weighted_sum(c)) and spoilt.weighted_sum(c).isfinite().all()
    assert torch.equal(a[4:], before[0][4:]) and torch.equal(b, before[1])


@some
@given(
    n=st.integers(0, 5),
    middle=st.sampled_from([(), (0,), (1,), (9,), (3, 4)]),
    rows=st.integers(1, 12),
    d=st.integers(1, 40),
    padding=st.booleans(),
    layout=st.sampled_from(["contiguous", "expanded", "transposed"]),
)
def test_lookup(n, middle, rows, d, padding, layout):
    if layout == "expanded":
        indices = torch.randint(0, rows, (1, *middle)).expand(n, *middle)
    else:
        indices = torch.randint(0, rows, (n, *middle))
        if layout == "transposed" and middle:
            indices = indices.transpose(0, -1).contiguous().transpose(0, -1)
    backprops = ordinary(n, *middle, d, seed=1)
    before = backprops.clone()
    padding_idx = rows - 1 if padding else None
    factor = Lookup(indices, backprops, rows, padding_idx)
    assert_stands_for(factor, exact_lookup(indices, backprops, rows, padding_idx))
    assert torch.equal(backprops, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 9, 5), (2, 3, 4, 40), (2, 0, 5), (0, 4, 5), (3, 5)])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_lookup_norms_by_kernels(shape, dtype, padding_idx, monkeypatch):
    indices, backprops = torch.randint(0, 6, shape[:-1]), ordinary(*shape, seed=1).to(dtype)
    by_reference = Lookup(indices, backprops, 6, padding_idx).sq_norm()
    transposed = backprops.transpose(-1, 0).contiguous().transpose(-1, 0)  # its last stride is not 1
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    for rows in (backprops, transposed):
        norm = Lookup(indices, rows, 6, padding_idx).sq_norm()
        exact = exact_lookup(indices, backprops, 6, padding_idx).flatten(1).norm(dim=1)
        assert relative_error(norm.value, by_reference.value) <= 1e-6
        assert (norm.upper.sqrt() >= exact).all()
        assert (norm.upper <= by_reference.upper * 1.0001).all()


@pytest.mark.parametrize("shape", [(0, 3), (4,), (4, 3), (4, 3, 5), (4, 3, 5, 2), (4, 5000)])
def test_dense(shape):
    values = ordinary(*shape, seed=0)
    assert_stands_for(Dense(values), values.double())
    assert Dense(values).materialize().data_ptr() != values.data_ptr() or not values.numel()


def test_dense_adds_its_own_error_to_the_bound():
    values = ordinary(3, 4, seed=0)
    error = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    upper = Dense(values, error).sq_norm().upper.sqrt()
    assert (upper >= values.double().norm(dim=1) + error).all()


def exact_outer(a, b):
    return torch.einsum("ntp,ntd->npd", b.double(), a.double())


@some
@given(
    n=st.integers(0, 4),
    t=st.integers(0, 20),
    s=st.integers(0, 20),
    rows=st.integers(1, 30),
    d=st.integers(1, 20),
    padding=st.booleans(),
)
def test_tied_embedding_and_head(n, t, s, rows, d, padding):
    indices, grads = torch.randint(0, rows, (n, t)), ordinary(n, t, d, seed=0)
    a, b = ordinary(n, s, d, seed=1), ordinary(n, s, rows, seed=2)
    padding_idx = 0 if padding else None
    tied = merge([OuterProduct(a, b), Lookup(indices, grads, rows, padding_idx)])
    assert isinstance(tied, Tied)
    assert_stands_for(tied, exact_lookup(indices, grads, rows, padding_idx) + exact_outer(a, b))


def test_tied_factors_that_cancel():
    """The head takes away what the embedding adds."""
    indices, grads = torch.randint(0, 30, (3, 8)), ordinary(3, 8, 5, seed=0)
    b = -torch.nn.functional.one_hot(indices, 30).float() * (1.0 + 2.0**-20)
    tied = merge([Lookup(indices, grads, 30), OuterProduct(grads, b)])
    exact = (exact_lookup(indices, grads, 30, None) + exact_outer(grads, b)).flatten(1).norm(dim=1)
    for form in (tied, tied.kept(), tied.materialized()):
        assert (form.sq_norm().upper.sqrt() >= exact).all()


def test_sums_of_factors_have_the_cross_terms():
    a1, b1, a2, b2 = (ordinary(4, t, w, seed=i) for i, (t, w) in enumerate([(3, 5), (3, 6), (7, 5), (7, 6)]))
    exact = torch.einsum("ntp,ntd->npd", b1.double(), a1.double()) + torch.einsum(
        "ntp,ntd->npd", b2.double(), a2.double()
    )
    assert_stands_for(merge([OuterProduct(a1, b1), OuterProduct(a2, b2)]), exact)
    assert_stands_for(merge([OuterProduct(a1, b1), OuterProduct(a2, b2).materialized()]), exact)
    mixed = merge([OuterProduct(a1.bfloat16(), b1), OuterProduct(a2, b2)])
    rounding = torch.einsum("ntp,ntd->npd", b1.double(), (a1.bfloat16() - a1).double())
    assert_stands_for(mixed, exact + rounding)
    indices = torch.randint(0, 6, (4, 9))
    rows = ordinary(4, 9, 5, seed=9)
    lookup = Lookup(indices, rows, 6)
    tied = exact_lookup(indices, rows, 6, None)
    assert_stands_for(merge([lookup, OuterProduct(a1, b1), OuterProduct(a2, b2)]), exact + tied)
    assert_stands_for(merge([lookup, lookup]), 2 * tied)
    assert_stands_for(merge([lookup, OuterProduct(a1, b1).materialized()]), tied + exact_outer(a1, b1))
    assert_stands_for(merge([lookup, Dense(ordinary(4, 6, 5, seed=3))]), tied + ordinary(4, 6, 5, seed=3))
    other = Lookup(indices, rows, 6, padding_idx=0)
    assert_stands_for(merge([lookup, other]), tied + exact_lookup(indices, rows, 6, 0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_dropped_sample_adds_exactly_nothing(poison):
    c = torch.tensor([0.5, 0.0, 2.0])
    indices = torch.randint(0, 6, (3, 9))
    for build in (
        lambda rows: Lookup(indices, rows, 6),
        lambda rows: OuterProduct(rows, ordinary(3, 9, 4, seed=2)),
        lambda rows: Dense(rows),
        row_sum,
    ):
        rows = ordinary(3, 9, 5, seed=1)
        clean = build(rows).weighted_sum(c)
        rows[1] = poison
        assert torch.equal(build(rows).weighted_sum(c), clean)
        upper = build(rows).sq_norm().upper
        assert torch.isfinite(upper[[0, 2]]).all() and not torch.isfinite(upper[1])


def test_large_tables_are_never_written_out_for_norms_and_sums():
    """N·V·D would be 64 GB here."""
    indices, rows = torch.randint(0, 1_000_000, (64, 16)), torch.randn(64, 16, 250)
    factor = Lookup(indices, rows, 1_000_000)
    assert factor.sq_norm().value.shape == (64,)
    assert factor.weighted_sum(torch.ones(64)).shape == (1_000_000, 250)


@settings(max_examples=60)
@given(
    n=st.integers(0, 4),
    shapes=st.lists(
        st.sampled_from([(), (7,), (256,), (2000,), (3, 5), (40, 33), (9, 3, 3, 3)]), min_size=1, max_size=9
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    data=st.data(),
)
def test_norms_taken_together_have_the_bits_of_each(n, shapes, dtype, data):
    """On a CPU: torch's sums on a GPU take as many threads a row as the number of rows leaves."""
    factors = []
    for shape in shapes:
        values = torch.randn(n, *shape).to(dtype)
        kind = data.draw(st.sampled_from(["exact", "with error", "strided", "outer product", "summed", "kept"]))
        if kind == "outer product":
            t, d, p = data.draw(st.sampled_from([(1, 64, 40), (4, 30, 20), (20, 40, 33), (30, 20, 3)]))
            factors.append(OuterProduct(torch.randn(n, t, d).to(dtype), torch.randn(n, t, p).to(dtype)))
        elif kind == "summed":
            factors.append(row_sum(torch.randn(n, 4, 17).to(dtype)))
        elif kind == "kept":
            t, d, p = data.draw(st.sampled_from([(40, 30, 8), (40, 30, 8), (20, 8, 30)]))
            factors.append(OuterProduct(torch.randn(n, t, d).to(dtype), torch.randn(n, t, p).to(dtype)).materialized())
        else:
            values = values.mT if kind == "strided" and len(shape) == 2 else values
            error = torch.rand(n, dtype=torch.float64) if kind == "with error" else None
            factors.append(Dense(values, error=error))
    with mock.patch.dict(stacked.STACKED, data.draw(st.sampled_from([{}, {"cpu": 2**20}]), "copied beside others")):
        found = sq_norms(factors)
    for factor, together in zip(factors, found, strict=True):
        alone = factor.sq_norm()
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one, other) if one.is_cpu else torch.allclose(one, other, rtol=1e-6, atol=0.0)


@pytest.mark.on_cpu
@pytest.mark.parametrize(("at_once", "calls"), [(2**26, 2), (2 * 3 * 17 * 4, 3)])
def test_small_gradients_of_one_shape_are_read_together(monkeypatch, at_once, calls):
    """As on a GPU, where each of them would be two launches."""
    monkeypatch.setitem(stacked.STACKED, "cpu", 3 * 17 * 4)
    monkeypatch.setattr(stacked, "_AT_ONCE", at_once)
    shapes = [(17,), (8,), (17,), (17,), (8,), (17,), (18,)]  # the last one is too large
    values = [ordinary(3, *shape, seed=i) for i, shape in enumerate(shapes)]
    errors = [torch.rand(3, dtype=torch.float64) * 1e-3 for _ in shapes]
    norm, taken = torch.linalg.vector_norm, []
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, *args, **of: taken.append(x) or norm(x, *args, **of))
    found = sq_norms([Dense(v, error=e) for v, e in zip(values, errors, strict=True)])
    assert len(taken) == calls + 1
    for (value, upper), v, e in zip(found, values, errors, strict=True):
        exact = torch.stack([x.square().sum() for x in v.double()])
        assert relative_error(value, exact) < 1e-5
        assert (upper >= (exact.sqrt() + e).square()).all()
        assert (upper <= (exact.sqrt() * (1 + 1e-5) + e).square() * (1 + 1e-5)).all()


def test_dense_factors_are_not_copied_for_their_norms(monkeypatch):
    factors, cat = [Dense(torch.randn(2, 300, 16)) for _ in range(2)], torch.cat

    def of_numbers(tensors, *args, **kwargs):
        assert all(x.numel() <= 2 for x in tensors)
        return cat(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", of_numbers)
    assert len(sq_norms(factors)) == 2


def test_row_norms_of_many_layers_are_worked_on_in_parts(monkeypatch):
    factors = [row_sum(torch.randn(3, 40, 7)) for _ in range(5)]
    alone = [factor.sq_norm() for factor in factors]
    monkeypatch.setattr("dpfast.arithmetic.stacked_norms._ENTRIES", 250)
    longest, cat = 0, torch.cat

    def watched(tensors, *args, **kwargs):
        nonlocal longest
        found = cat(tensors, *args, **kwargs)
        longest = max(longest, found.numel())
        return found

    monkeypatch.setattr(torch, "cat", watched)
    for factor, together in zip(alone, sq_norms(factors), strict=True):
        assert all(map(torch.equal, together, factor))
    assert longest == 240
