"""Units of any number of rows where kernels run: few launches for all lengths, and a sample's bits for each unit."""

import pytest
import torch
from standing_for import assert_stands_for, ordinary

from dpfast.arithmetic import reference
from dpfast.factors import Lookup, OuterProduct, Runs, by_unit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [0, 1, 2, 5, 17, 1, 45, 5]
UNITS = len(LENGTHS)
SIZES = {"gram and direct": (1, 78, 74), "thin": (1, 70, 5), "records": (3, 20, 9)}  # positions of a row, D, P

pytestmark = pytest.mark.usefixtures("kernels_run")


def whose(in_order):
    """Of each row, nobody's among them."""
    ids = torch.cat(
        [torch.tensor([-1] * (u % 2) + [u] * length, dtype=torch.int64) for u, length in enumerate(LENGTHS)]
    )
    return ids if in_order else ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


def rows(kind, r, dtype=torch.float32):
    t, d, p = SIZES[kind]
    a, b = ordinary(r, t, d, seed=0), ordinary(r, t, p, seed=1)
    return OuterProduct(a.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE))


def bits(factor):
    """Of each unit: norms, those of gradients that are written with their bounds, and the gradients."""
    norm, dense, kept = factor.sq_norm(), factor.materialized(), factor.kept()
    return [norm.value, kept.sq_norm().value, *dense.sq_norm(), factor.materialize(), dense.values, kept.materialize()]


@pytest.mark.parametrize(("kind", "in_order"), [("gram and direct", True), ("thin", False), ("records", False)])
def test_units_stand_for_their_rows(kind, in_order, monkeypatch):
    ids = whose(in_order)
    factor = rows(kind, len(ids))
    exact, whose_row = torch.zeros(UNITS, *factor.shape, dtype=torch.float64, device=DEVICE), ids.to(DEVICE)
    gradients = torch.einsum("ntp,ntd->npd", factor.backprops.double(), factor.activations.double())
    exact.index_add_(0, whose_row[whose_row >= 0], gradients[whose_row >= 0])
    units = by_unit(factor, Runs(ids, UNITS))
    assert_stands_for(units, exact)
    together = units.sq_norm()
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 50 * factor.nbytes // len(ids))  # rows brought together in pieces
    assert all(map(torch.equal, by_unit(factor, Runs(ids, UNITS)).sq_norm(), together))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gram and direct", torch.bfloat16), ("thin", torch.float32), ("records", torch.float16)]
)
def test_a_unit_has_the_bits_of_a_sample_and_in_any_company_its_own(kind, dtype):
    ids = whose(True)
    factor = rows(kind, len(ids), dtype)
    units = by_unit(factor, Runs(ids, UNITS))
    together, upper = bits(units), units.sq_norm().upper
    without_rows = bits(by_unit(factor, Runs(torch.full_like(ids, -1), 1)))
    assert all(torch.equal(x[0], y[0]) for x, y in zip(together, without_rows, strict=True))
    for unit in (1, 4, 6):
        own = ids == unit
        alone = by_unit(factor, Runs(torch.where(own, 0, -1), 1))
        assert torch.equal(alone.sq_norm().upper[0], upper[unit])
        sample = OuterProduct(*(x[own].flatten(0, 1).unsqueeze(0) for x in (factor.activations, factor.backprops)))
        # Row norms of Gram norms' bounds are added in another order.
        torch.testing.assert_close(sample.sq_norm().upper[0], upper[unit], rtol=1e-12, atol=0)
        for x, y, z in zip(together, bits(alone), bits(sample), strict=True):
            assert torch.equal(x[unit], y[0])
            assert torch.equal(x[unit], z[0])


@pytest.mark.parametrize(
    ("kind", "norms"),
    [("gram and direct", {"_gram_norm_kernel": 1, "_outer_kernel": 1}), ("thin", {"_grouped_norm_kernel": 1})],
)
def test_launches_do_not_grow_with_lengths(launches, kind, norms):
    ids = whose(True)
    by_unit(rows(kind, len(ids)), Runs(ids, UNITS)).sq_norm()
    assert norms.items() <= {name: launches.count(name) for name in launches}.items()


def test_launches_of_repeated_calls_are_counted(monkeypatch, request):
    """As on a GPU, where what was counted went by: tests of few launches saw none."""
    from dpfast.kernels import _repeat

    monkeypatch.setattr(_repeat, "_DEVICES", {"cpu", "cuda"})
    launches, factor = request.getfixturevalue("launches"), rows("gram and direct", 3)
    factor.sq_norm()
    first = [*launches]
    factor.sq_norm()
    assert first and launches == [*first, *first]


def test_a_neighbours_nan_reaches_nobody():
    ids = whose(True)
    for kind in ("gram and direct", "thin"):
        factor = rows(kind, len(ids))
        clean = by_unit(factor, Runs(ids, UNITS)).sq_norm()
        factor.backprops[(ids == 4) | (ids == -1)] = float("nan")
        spoilt = by_unit(factor, Runs(ids, UNITS)).sq_norm()
        others = torch.arange(UNITS) != 4
        assert all(torch.equal(x[others], y[others]) for x, y in zip(clean, spoilt, strict=True))
        assert spoilt.upper[4].isnan()


@pytest.mark.parametrize("positions", [1, 3])
def test_lookups_have_one_launch_and_a_samples_bits(launches, positions):
    ids = whose(False)
    indices = torch.randint(0, 6, (len(ids), positions), generator=torch.Generator().manual_seed(0))
    backprops = ordinary(len(ids), positions, 20, seed=1).to(torch.bfloat16).to(DEVICE)
    backprops[ids == -1] = float("nan")
    factor = Lookup(indices.to(DEVICE), backprops, 6, padding_idx=2)
    found = by_unit(factor, Runs(ids, UNITS)).sq_norm()
    assert launches == ["_lookup_norm_kernel", "_sum_partials_kernel", "_sum_partials_kernel"]
    assert found.value[LENGTHS.index(0)] == 0
    for unit in (1, 4, 6):
        own = (ids == unit).to(DEVICE)
        alone = by_unit(factor, Runs(torch.where(ids == unit, 0, -1), 1)).sq_norm()
        sample = Lookup(factor.indices[own].view(1, -1), backprops[own].view(1, -1, 20), 6, padding_idx=2).sq_norm()
        for x, y, z in zip(found, alone, sample, strict=True):
            assert torch.equal(x[unit], y[0]) and torch.equal(x[unit], z[0])
    empty = by_unit(factor.taken(slice(0, 0)), Runs(ids[:0], 3)).sq_norm()
    assert torch.equal(empty.upper, torch.zeros(3, dtype=torch.float64, device=DEVICE))
