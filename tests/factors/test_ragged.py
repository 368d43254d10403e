"""Gradients of units against a loop over them, and a unit's bits in whatever batch it stands."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from standing_for import assert_stands_for, ordinary

from dpfast.arithmetic import reference
from dpfast.errors import InputError
from dpfast.factors import Blocks, Dense, Lookup, OuterProduct, PatchProduct, Ragged, Reshaped, Runs, by_unit, row_sum
from dpfast.factors.merge import Tied, merge
from dpfast.factors.ragged import Parted
from dpfast.testing import relative_error

some = settings(derandomize=True, deadline=None, max_examples=25)


def by_loop(of_rows, ids, num_units):
    """Σ of each unit's rows (R, *shape), fp64."""
    out = torch.zeros(num_units, *of_rows.shape[1:], dtype=torch.float64)
    for row, unit in zip(of_rows.double(), ids.tolist(), strict=True):
        if unit >= 0:
            out[unit] += row
    return out


def outer(r, t, d, p, seed=0):
    return OuterProduct(ordinary(r, t, d, seed=seed), ordinary(r, t, p, seed=seed + 1))


def lookup(r, t, rows, d, seed=0, padding_idx=None):
    indices = torch.randint(0, rows, (r, t), generator=torch.Generator().manual_seed(seed))
    return Lookup(indices, ordinary(r, t, d, seed=seed), rows, padding_idx)


def tied(r, t, rows, d, seed=0):
    return merge([lookup(r, t, rows, d, seed, padding_idx=1), outer(r, t + 1, d, rows, seed)])


def patches(r, seed=0):
    geometry = {"kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1), "padding": (1, 1), "groups": 1}
    return PatchProduct(ordinary(r, 5, 6, 6, seed=seed), ordinary(r, 7, 6, 6, seed=seed + 1), **geometry)


BUILD = {
    "outer product": lambda r: outer(r, 3, 9, 8),
    "rows": lambda r: outer(r, 1, 9, 8),
    "rows the Gram way": lambda r: outer(r, 1, 120, 100),
    "kept": lambda r: outer(r, 5, 30, 3),
    "lookup": lambda r: lookup(r, 4, 7, 6),
    "padded lookup": lambda r: lookup(r, 2, 7, 6, padding_idx=0),
    "tied": lambda r: tied(r, 3, 9, 5),
    "dense": lambda r: Dense(ordinary(r, 4, 5, seed=0)),
    "dense with an error": lambda r: Dense(ordinary(r, 5, seed=0), error=torch.full((r,), 1e-7, dtype=torch.float64)),
    "numbers": lambda r: Dense(ordinary(r, seed=0)),
    "bias": lambda r: row_sum(ordinary(r, 3, 5, seed=0)),
    "convolution": patches,
    "reshaped": lambda r: Reshaped(outer(r, 2, 6, 4), torch.Size((4, 3, 2))),
    "blocks": lambda r: Blocks([outer(r, 2, 6, 4), outer(r, 3, 6, 2, seed=5)]),
    "tied by values": lambda r: merge([lookup(r, 3, 6, 5), Dense(ordinary(r, 6, 5, seed=3))]),
}


def several(r):
    """More than one use of a parameter."""
    return [outer(r, 1, 30, 3), outer(r, 5, 30, 3, seed=3), outer(r, 2, 30, 3, seed=6)]


@pytest.mark.parametrize("kind", BUILD)
@some
@given(ids=st.lists(st.integers(-1, 5), max_size=14), more=st.integers(0, 2), in_order=st.booleans())
def test_units_of_any_number_of_rows(kind, ids, more, in_order):
    ids = torch.tensor(sorted(ids) if in_order else ids, dtype=torch.int64)
    if kind == "convolution" and not len(ids):
        return
    num_units = int(ids.max()) + 1 + more if len(ids) else more
    factor = BUILD[kind](len(ids))
    exact = by_loop(factor.materialize(), ids, num_units)
    before = factor.materialize()
    assert_stands_for(by_unit(factor, Runs(ids, num_units)), exact)
    assert torch.equal(factor.materialize(), before)


def bits(factor):
    """Of each unit: norms of each form, and its gradient."""
    forms = [factor, factor.kept(), factor.materialized()]
    return [*(x for form in forms for x in form.sq_norm()), factor.materialize(), factor.kept().materialize()]


@pytest.mark.parametrize("kind", BUILD)
def test_a_unit_has_the_same_bits_in_whatever_batch_it_stands(kind):
    ids = torch.tensor([3, 0, 1, 1, -1, 2, 0, 3, 3, 5, 3, 3, 5, 5, 5, 5, 0])
    factor = BUILD[kind](len(ids))
    together = bits(by_unit(factor, Runs(ids, 6)))
    for unit in (0, 1, 2, 3, 4, 5):
        alone = bits(by_unit(factor, Runs(torch.where(ids == unit, 0, -1), 1)))
        for x, y in zip(together, alone, strict=True):
            if x.is_cpu:
                assert torch.equal(x[unit], y[0])
            else:  # cuBLAS may add up the products of other shapes in another order
                torch.testing.assert_close(x[unit], y[0], rtol=1e-5, atol=1e-5)
    assert (together[1][4] <= 1e-30).all()  # it has no rows


@pytest.mark.parametrize(("k", "t", "d", "p"), [(1, 5, 9, 8), (4, 3, 9, 8), (40, 1, 30, 3), (7, 1, 64, 64)])
def test_equal_runs_in_order_are_samples(k, t, d, p):
    a, b = ordinary(6 * k, t, d, seed=0), ordinary(6 * k, t, p, seed=1)
    equal = by_unit(OuterProduct(a, b), Runs(torch.arange(6).repeat_interleave(k), 6))
    plain = OuterProduct(a.view(6, k * t, d), b.view(6, k * t, p))
    assert type(equal) is OuterProduct
    assert equal.activations.data_ptr() == a.data_ptr() and equal.backprops.data_ptr() == b.data_ptr()
    assert all(map(torch.equal, bits(equal), bits(plain)))
    order = torch.randperm(6 * k, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(6).repeat_interleave(k)[order]
    mixed = by_unit(OuterProduct(a, b), Runs(ids, 6))
    rows = torch.cat([(ids == u).nonzero().flatten() for u in range(6)])
    plain = OuterProduct(a[rows].view(6, k * t, d), b[rows].view(6, k * t, p))
    assert isinstance(mixed, Ragged)
    assert all(map(torch.equal, bits(mixed), bits(plain)))


def test_units_whose_gradients_are_kept_stand_beside_others():
    ids = torch.tensor([0] * 3 + [1] * 40 + [2] * 41 + [3] * 2)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    factor = outer(len(ids), 1, 30, 20)
    units = by_unit(factor, Runs(ids, 5))
    kept = units.kept()
    assert isinstance(kept, Parted) and len(kept.parts) == (3 if ids.is_cpu else 2)  # a GPU writes 40 and 41 at once
    assert_stands_for(units, by_loop(factor.materialize(), ids, 5))


@pytest.mark.parametrize("beside", ["same rows", "other rows", "samples", "values", "lookup", "lookup of other rows"])
def test_uses_of_one_parameter_have_their_cross_terms(beside):
    ids = torch.tensor([0, 2, 2, -1, 0, 4, 4, 4, 4])
    others = torch.tensor([4, 4, 0, 1])
    runs, other_runs = Runs(ids, 5), Runs(others, 5)
    one = outer(9, 2, 6, 7)
    pairs = [(one, ids, runs)]
    if beside == "same rows":
        pairs += [(outer(9, 3, 6, 7, seed=4), ids, runs)]
    elif beside == "other rows":
        pairs += [(outer(4, 3, 6, 7, seed=4), others, other_runs), (outer(9, 1, 6, 7, seed=8), ids, runs)]
    elif beside == "lookup":
        pairs += [(lookup(9, 2, 7, 6, padding_idx=2), ids, runs)]
    elif beside == "lookup of other rows":
        pairs += [(lookup(4, 3, 7, 6, padding_idx=2), others, other_runs), (lookup(9, 1, 7, 6), ids, runs)]
    elif beside == "values":
        pairs += [(Dense(ordinary(9, 7, 6, seed=4)), ids, runs)]
    exact = sum(by_loop(f.materialize(), i, 5) for f, i, _ in pairs)
    factors = [by_unit(f, r) for f, _, r in pairs]
    if beside == "samples":
        factors.append(outer(5, 2, 6, 7, seed=4))
        exact = exact + factors[-1].materialize().double()
    merged = merge(factors)
    assert_stands_for(merged, exact)
    if beside == "lookup":
        assert isinstance(merged, Ragged) and isinstance(merged.rows, Tied)


def test_several_uses_leave_a_unit_its_bits():
    ids = torch.tensor([3, 0, 1, 1, -1, 2, 0, 3, 3, 5, 3, 3, 5, 5, 5, 5, 0])
    factors = several(len(ids))

    def merged(ids, num_units):
        runs = Runs(ids, num_units)
        return merge([by_unit(f, runs) for f in factors])

    together = bits(merged(ids, 6))
    for unit in range(6):
        alone = bits(merged(torch.where(ids == unit, 0, -1), 1))
        assert all(torch.equal(x[unit], y[0]) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_of_a_dropped_unit_and_of_nobody_add_exactly_nothing(kind, poison):
    ids = torch.tensor([1, 0, -1, 1, 2, 2, 2])

    def build(*poisoned):
        factor = BUILD[kind](7)
        for rows in (0, 3) if "dropped" in poisoned else ():
            spoil(factor, rows, poison)
        if "nobody's" in poisoned:
            spoil(factor, 2, poison)
        return by_unit(factor, Runs(ids, 3))

    c = torch.tensor([0.5, 0.0, 2.0])
    clean = build()
    spoilt = build("nobody's")
    for x, y in ((clean, spoilt), (clean.kept(), spoilt.kept())):
        assert all(map(torch.equal, x.sq_norm(), y.sq_norm()))
    spoilt = build("nobody's", "dropped")
    upper = spoilt.sq_norm().upper
    assert upper[[0, 2]].isfinite().all() and not upper[1].isfinite()
    assert relative_error(spoilt.weighted_sum(c), clean.weighted_sum(c)) <= 1e-6
    assert torch.equal(spoilt.kept().weighted_sum(c), clean.kept().weighted_sum(c))


def spoil(factor, row, poison):
    for inner in getattr(factor, "factors", [getattr(factor, "factor", factor)]):
        for one in getattr(inner, "uses", [inner]):
            tensor = next(getattr(one, n) for n in ("backprops", "rows", "values") if hasattr(one, n))
            (tensor if isinstance(tensor, torch.Tensor) else one.rows)[row] = poison


@pytest.mark.parametrize("width", [1, 70])
def test_ten_thousand_units_of_mixed_length(width, monkeypatch):
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 2**20)
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 12, (10_000,), generator=generator)
    ids = torch.arange(10_000).repeat_interleave(counts)
    ids = ids[torch.randperm(len(ids), generator=generator)]
    a, b = ordinary(len(ids), 3, seed=0), ordinary(len(ids), width, seed=1)
    runs = Runs(ids, 10_000)
    assert len(runs.buckets) == 11
    factor = by_unit(OuterProduct(a, b), runs)
    exact = torch.zeros(10_000, width, 3, dtype=torch.float64)
    exact.index_add_(0, ids, torch.einsum("np,nd->npd", b.double(), a.double()))
    norm = factor.sq_norm()
    assert relative_error(norm.value.sqrt(), exact.flatten(1).norm(dim=1)) <= 1e-5
    assert (norm.upper.sqrt() >= exact.flatten(1).norm(dim=1)).all()
    c = torch.rand(10_000, generator=generator)
    assert relative_error(factor.weighted_sum(c), torch.einsum("n,npd->pd", c.double(), exact)) <= 1e-5
    values = by_unit(Dense(b), runs)
    assert (
        relative_error(values.materialize(), torch.zeros(10_000, width).double().index_add_(0, ids, b.double())) <= 1e-5
    )


def test_rows_that_nobody_knows_of():
    with pytest.raises(InputError, match="saw 4 rows, and it is known of 3"):
        by_unit(outer(4, 1, 2, 3), Runs(torch.zeros(3, dtype=torch.int64), 1))
