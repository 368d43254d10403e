"""Norms of tables on a CPU: of a few samples' whole tables where they have few rows, else of rows brought together."""

import pytest
import torch

from dpfast.arithmetic import reference
from dpfast.factors import Lookup, lookup

pytestmark = [pytest.mark.on_cpu, pytest.mark.usefixtures("by_reference")]

N, T, D = 6, 40, 96


@pytest.fixture
def by_reference(monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", "reference")


def found(rows: int, padding_idx: int | None = None) -> Lookup:
    indices = torch.randint(0, rows, (N, T))
    indices[1] = 2  # one row gets all
    return Lookup(indices, torch.randn(N, T, D), rows, padding_idx)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("rows", [3 * T, 3 * T + 1, 1000])
def test_norms_are_those_of_a_loop(rows, padding_idx):
    of = found(rows, padding_idx)
    exact = torch.zeros(N, rows, D, dtype=torch.float64)
    for n in range(N):
        for t in range(T):
            if of.indices[n, t] != padding_idx:
                exact[n, of.indices[n, t]] += of.backprops[n, t].double()
    norm = of.sq_norm()
    squared = exact.square().sum((1, 2))
    torch.testing.assert_close(norm.value, squared, rtol=1e-6, atol=0.0)
    assert (norm.upper >= squared).all() and (norm.upper <= squared * (1 + 1e-4) + 1e-30).all()


def test_tables_are_written_a_few_samples_at_a_time(monkeypatch):
    """So that caches hold them; and no sample's bits know of the others."""
    written = []
    table = Lookup.table
    monkeypatch.setattr(Lookup, "table", lambda self: written.append(self.num_samples) or table(self))
    of = found(3 * T)
    whole = of.sq_norm()
    assert written == [N]
    monkeypatch.setattr(reference, "KEPT_BLOCK", 4 * 4 * 3 * T * D)  # four samples'
    assert torch.equal(of.sq_norm().upper, whole.upper) and written[1:] == [4, 2]
    for n in range(N):
        alone = of.taken(slice(n, n + 1)).sq_norm()
        assert torch.equal(alone.value, whole.value[n : n + 1]) and torch.equal(alone.upper, whole.upper[n : n + 1])


def test_both_ways_give_the_same(monkeypatch):
    of = found(3 * T)
    tables = of.sq_norm()
    monkeypatch.setattr(lookup, "_WHOLE_TABLE", 0)
    assert of.shape.numel() * 4 > lookup._SMALL_TABLE
    segments = of.sq_norm()
    torch.testing.assert_close(tables.value, segments.value, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(tables.upper, segments.upper, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("n", "t"), [(0, 5), (3, 0)])
def test_nothing_looked_up(n, t):
    norm = Lookup(torch.zeros(n, t, dtype=torch.long), torch.randn(n, t, 4), 7).sq_norm()
    assert norm.value.shape == (n,) and not norm.value.any()
