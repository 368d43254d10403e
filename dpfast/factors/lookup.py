"""Gradients of a table of rows, from the rows that each sample looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, accumulating_dtype, bounds, lookup_sq_norm, ops, sums, towards_zero
from dpfast.factors.dense import Dense, Factor


class Lookup:
    """Gradients of a table of rows: position t of sample n adds ``backprops[n, t]`` to row ``indices[n, t]``.

    Args:
        indices: (N, ...) integers in [0, num_embeddings).
        backprops: (N, ..., D).
        padding_idx: positions with this index add nothing.
    """

    def __init__(self, indices: Tensor, backprops: Tensor, num_embeddings: int, padding_idx: int | None = None):
        n, d = backprops.shape[0], backprops.shape[-1]
        positions = indices[0].numel() if n else 0
        self.indices = indices.reshape(n, positions)
        self.backprops = backprops.reshape(n, positions, d)
        self.padding_idx = padding_idx
        self.shape = torch.Size((num_embeddings, d))

    @property
    def num_samples(self) -> int:
        return self.indices.shape[0]

    def rows(self) -> Tensor:
        """Backprops in the accumulating dtype, with zeros at padding."""
        rows = self.backprops.to(accumulating_dtype(self.backprops))
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((self.indices == self.padding_idx).unsqueeze(-1), 0.0)

    def _keys(self) -> Tensor:
        """One number per (sample, row of the table), (N·T,)."""
        first = torch.arange(self.num_samples, device=self.indices.device) * self.shape[0]
        return (self.indices + first.unsqueeze(-1)).flatten()

    def materialize(self, scale: float = 1.0) -> Tensor:
        rows = self.rows()
        out = rows.new_zeros(self.num_samples * self.shape[0], self.shape[1])
        out.index_add_(0, self._keys(), rows.flatten(0, 1), alpha=scale)
        return out.view(self.num_samples, *self.shape)

    def segments(self) -> tuple[Tensor, Tensor]:
        """The gradient's non-zero rows: (values (N·T, D), their sample (N·T,)), unused places zero.

        Equal (sample, index) pairs are brought together by a stable sort, so a sample's sums are added in the
        order of its positions whatever batch it stands in. Memory: N·T·D, never N·V·D.
        """
        rows = self.rows()
        keys, order = self._keys().sort(stable=True)
        new_segment = torch.ones_like(keys, dtype=torch.bool)
        new_segment[1:] = keys[1:] != keys[:-1]
        segment = new_segment.cumsum(0) - 1
        values = rows.new_zeros(keys.numel(), self.shape[1])
        values.index_add_(0, segment, rows.flatten(0, 1)[order])
        sample = keys.new_zeros(keys.numel())
        sample[segment] = keys // self.shape[0]
        return values, sample

    def sq_norm(self) -> SquaredNorm:
        if ops.runs_kernels(self.backprops):
            return lookup_sq_norm(self.indices, self.backprops, self.padding_idx)
        values, sample = self.segments()
        dtype = values.dtype
        total = values.new_zeros(self.num_samples, dtype=torch.float64)
        total.index_add_(0, sample, sums.row_sq_norm(values))
        numel = self.indices.shape[1] * self.shape[1]
        width = min(self.shape[1], sums.SUM_BLOCK) + bounds.summed_after(self.indices.shape[1], dtype)
        return bounds.dense(total, width=width, numel=numel, dtype=dtype, error=self._error())

    def _error(self) -> Tensor:
        """How far the summed rows may be from the exact ones, in L2 norm."""
        rows = self.rows()
        row_sums = sums.row_norm(rows).sum(-1)
        positions, width = rows.shape[1:]
        return bounds.chain_error(row_sums, terms=positions, numel=positions * width, dtype=rows.dtype)

    def materialized(self) -> Dense:
        return Dense(self.materialize(), error=self._error())

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        rows = self.rows()
        c = towards_zero(coefficients, rows.dtype)[:, None, None]
        scaled = (rows * c).masked_fill(c == 0, 0.0)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return torch.ops.aten.embedding_dense_backward(scaled, self.indices, self.shape[0], padding, False)

    def kept(self) -> Factor:
        return self
