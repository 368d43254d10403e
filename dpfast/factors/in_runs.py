"""Outer products and lookups of units that have any number of one list's rows, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dpfast.arithmetic import SquaredNorm, UnitRuns, lookup_unit_sq_norm, unit_runs
from dpfast.factors.dense import Dense
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct


class InRuns:
    """``G_u = Σ_t b_t a_tᵀ`` over the positions of a unit's run.

    Args:
        rows: (R, T, ·). runs: whose their R·T positions are; units of one ``unit_runs.launch_class`` of what is asked.
    """

    def __init__(self, rows: OuterProduct, runs: UnitRuns):
        self.pair = rows.activations.flatten(0, 1), rows.backprops.flatten(0, 1)
        self.runs = runs

    def materialize(self, scale: float = 1.0) -> Tensor:
        return unit_runs.grad_sample(*self.pair, self.runs, scale=scale)

    def sq_norm(self) -> SquaredNorm:
        return unit_runs.sq_norm(*self.pair, self.runs)

    def materialized(self) -> Dense:
        norm, error, gradients = unit_runs.certified(*self.pair, self.runs)
        assert gradients is not None
        return Dense(gradients, error=error, norm=norm)

    def kept(self) -> Dense:
        return self.materialized()


class LookedUpInRuns(NamedTuple):
    """Norms of a table's gradients: rows (R, T, ·), the unit of each, and the runs of R·T positions sorted by unit."""

    rows: Lookup
    ids: Tensor
    runs: UnitRuns

    def sq_norm(self) -> SquaredNorm:
        indices, backprops = (x.flatten(0, 1).unsqueeze(0) for x in (self.rows.indices, self.rows.backprops))
        ids = self.ids.repeat_interleave(self.rows.indices.shape[1])
        padding_idx, entries = self.rows.padding_idx, self.rows.shape[0]
        return lookup_unit_sq_norm(indices, backprops, padding_idx, entries=entries, ids=ids, runs=self.runs)
