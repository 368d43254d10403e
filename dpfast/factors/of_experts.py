"""Gradients of weights that a layer has for each of its experts, (E, P, D), where each row goes to one expert."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, sums
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.ragged import by_unit
from dpfast.factors.runs import NOBODY, Runs


class OfExperts:
    """``G_n[e] = Σ_{s: units[s] = n, experts[s] = e} H_s``, of a parameter of shape (E, *shape of H).

    A sample and an expert together are a unit: what holds of ragged factors holds of each, and a sample's bits depend
    on its own rows alone. Experts that none of its rows went to have zeros.

    Args:
        rows: factor of S rows, an outer product or values, those of one expert together, experts in order.
        experts: of each row, (S,) int64, ascending, in [0, num_experts).
        runs: whose each row is.
    """

    def __init__(self, rows: Any, experts: Tensor, num_experts: int, runs: Runs):
        self.rows, self.experts, self.num_experts, self.runs = rows, experts.cpu(), num_experts, runs
        self.shape = torch.Size((num_experts, *rows.shape))

    def by_unit(self, runs: Runs) -> OfExperts:
        """The units that rows belong to so far are the rows of others."""
        ids = torch.cat([runs.ids, runs.ids.new_tensor([NOBODY])])[self.runs.ids]
        return OfExperts(self.rows, self.experts, self.num_experts, Runs(ids, runs.num_units))

    @property
    def num_samples(self) -> int:
        return self.runs.num_units

    @cached_property
    def _pairs(self) -> Any:
        """The factor of U·E units: each sample with each expert."""
        ids = self.runs.ids
        pairs = torch.where(ids == NOBODY, NOBODY, ids * self.num_experts + self.experts)
        return by_unit(self.rows, Runs(pairs, self.num_samples * self.num_experts))

    def materialize(self, scale: float = 1.0) -> Tensor:
        values: Tensor = self._pairs.materialize(scale)
        return values.view(self.num_samples, *self.shape)

    def sq_norm(self) -> SquaredNorm:
        value, upper = (sums.sum_blocks(x.view(-1, self.num_experts)) for x in self._pairs.sq_norm())
        return SquaredNorm(value, upper * (1.0 + 2.0**-40))

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        if isinstance(self.rows, Dense):
            return self.materialized().weighted_sum(coefficients)
        of_rows = self.runs.of_rows(coefficients)
        counts = torch.bincount(self.experts, minlength=self.num_experts).tolist()
        total = torch.zeros(self.shape, dtype=self.rows.dtype, device=self.rows.device)
        first = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(first, first + count)
                total[expert] = self.rows.taken(rows).weighted_sum(of_rows[rows])
                first += count
        return total

    def materialized(self) -> Dense:
        dense = self._pairs.materialized()
        error = dense.error
        if error is not None:
            squares = error.view(-1, self.num_experts).square()
            error = sums.sum_blocks(squares).sqrt() * (1.0 + 2.0**-40)
        return Dense(dense.values.view(self.num_samples, *self.shape), error=error)

    def kept(self) -> Factor:
        return self
