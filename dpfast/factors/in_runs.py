"""Outer products of units that are runs of one list of rows, as kernels read them."""

from __future__ import annotations

from torch import Tensor

from dpfast.arithmetic import SquaredNorm, UnitRuns, unit_runs
from dpfast.factors.dense import Dense
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
