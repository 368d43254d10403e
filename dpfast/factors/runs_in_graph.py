"""Units in a captured graph: which rows are whose is known when it runs, not while it is captured.

What depends on that is one opaque operation each, whose results have shapes that do not: norms of units, and rows of
values added up by unit. It runs the eager code, so units have the eager step's bits. Clipped sums need no more than
each row's coefficient, and are the graph's own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm
from dpfast.factors.dense import Dense
from dpfast.factors.runs import Runs


class RunsInGraph:
    """What stands for :class:`Runs` while a graph is captured.

    Args:
        ids: the unit of each row, (R,), without values; -1: nobody's. num_units: U.
    """

    is_equal = False

    def __init__(self, ids: Tensor, num_units: int):
        self.ids, self.num_units = ids, num_units

    def of_rows(self, by_unit: Tensor) -> Tensor:
        """Each row has its unit's number, nobody's rows have 0: (U,) -> (R,)."""
        return torch.cat([by_unit, by_unit.new_zeros(1)])[self.ids.where(self.ids >= 0, self.num_units)]

    def sq_norm(self, rows: Any) -> SquaredNorm:
        """Of units, from an outer product or a lookup of rows, or both of a tied table."""
        uses = getattr(rows, "uses", [rows])
        lookup = next((use for use in uses if hasattr(use, "indices")), None)
        product = next((use for use in uses if use is not lookup), None)
        found = torch.ops.dpfast.unit_sq_norm(
            None if lookup is None else lookup.indices,
            None if lookup is None else lookup.rows(),
            None if product is None else product.activations,
            None if product is None else product.backprops,
            rows.shape[0],
            self.ids,
            self.num_units,
        )
        return SquaredNorm(*found)

    def added(self, dense: Dense) -> Dense:
        """Gradients of rows, added by unit."""
        values, error = torch.ops.dpfast.added_by_unit(dense.values, dense.error, self.ids, self.num_units)
        return Dense(values, error=error)


class _Last(threading.local):
    runs: Runs | None = None


_last = _Last()


def runs_of(ids: Tensor, num_units: int) -> Runs:
    """Of the step that runs: its layers ask one after the other."""
    last = _last.runs
    if last is None or last.num_units != num_units or not torch.equal(last.ids, ids.cpu()):
        last = _last.runs = Runs(ids, num_units)
    return last
