"""Gradients of a table of rows, from the rows that each sample looked up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from dpfast.arithmetic import (
    SquaredNorm,
    SumError,
    Unfinished,
    accumulating_dtype,
    bounds,
    finished,
    is_traced,
    lookup_sq_norm,
    ops,
    reference,
    sums,
    towards_zero,
    unfinished_norm,
)
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.runs import take

_SMALL_TABLE = 2**14  # bytes


def is_small_table(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a sample's whole table takes less than bringing equal indices together; ``dtype``: of sums."""
    return device.type == "cpu" and shape.numel() * dtype.itemsize <= _SMALL_TABLE


_WHOLE_TABLE = 3
"""Rows of a table for each position up to which a CPU writes a sample's whole table sooner than it brings equal indices
together, and in fewer calls by twenty."""


class Lookup:
    """Gradients of a table of rows: position t of sample n adds ``backprops[n, t]`` to row ``indices[n, t]``.

    Args:
        indices: (N, ...) integers in [0, num_embeddings).
        backprops: (N, ..., D).
        padding_idx: positions with this index add nothing.

    Attributes:
        of: the ``id`` of both, as they were given.
    """

    def __init__(self, indices: Tensor, backprops: Tensor, num_embeddings: int, padding_idx: int | None = None):
        n, d = backprops.shape[0], backprops.shape[-1]
        positions = indices[0].numel() if n else 0
        self.indices = indices.reshape(n, positions)
        self.backprops = backprops.reshape(n, positions, d)
        self.padding_idx = padding_idx
        self.shape = torch.Size((num_embeddings, d))
        self.of = id(indices), id(backprops)

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
        """One number per (sample, row of the table), (N, T)."""
        make = _firsts_made if is_traced() else _firsts  # nothing of a graph may stay
        return self.indices + make(self.num_samples, self.shape[0], self.indices.device)

    def materialize(self, scale: float = 1.0) -> Tensor:
        rows = self.rows()
        out = rows.new_zeros(self.num_samples * self.shape[0], self.shape[1])
        rows = rows.flatten(0, 1)
        sums.add_rows(out, self._keys().flatten(), rows * scale if scale != 1.0 else rows)
        return out.view(self.num_samples, *self.shape)

    def table(self) -> Tensor:
        """(N, *shape), each row's sums in the order of positions, on a CPU."""
        n, rows = self.num_samples, self.rows()
        table = torch.ops.aten.embedding_dense_backward.default(rows, self._keys(), n * self.shape[0], -1, False)
        return table.view(n, *self.shape)

    def _tables(self) -> Iterator[Tensor]:
        """Those of a few samples at a time, which are still in the cache when their norms are taken."""
        n, at_once = self.num_samples, max(1, reference.KEPT_BLOCK // (self.shape.numel() * self.dtype.itemsize))
        if n <= at_once or is_traced():
            yield self.table()
            return
        for first in range(0, n, at_once):
            yield self.taken(slice(first, first + at_once)).table()

    def segments(self) -> tuple[Tensor, Tensor]:
        """The gradient's non-zero rows: (values (N·T, D), their sample (N·T,)), unused places zero.

        Equal (sample, index) pairs are brought together by a stable sort, so a sample's sums are added in the
        order of its positions whatever batch it stands in. Memory: N·T·D, never N·V·D.
        """
        rows = self.rows()
        keys, order = self._keys().flatten().sort(stable=True)
        new_segment = torch.ones_like(keys, dtype=torch.bool)
        new_segment[1:] = keys[1:] != keys[:-1]
        segment = new_segment.cumsum(0) - 1
        values = rows.new_zeros(keys.numel(), self.shape[1])
        sums.add_rows(values, segment, rows.flatten(0, 1)[order])
        sample = keys.new_zeros(keys.numel())
        sample[segment] = keys // self.shape[0]
        return values, sample

    def sq_norm(self) -> SquaredNorm:
        if ops.runs_kernels(self.backprops):
            return lookup_sq_norm(self.indices, self.backprops, self.padding_idx)
        return finished(self.unfinished_of(self.error()))

    def unfinished(self) -> Unfinished | None:
        """What the norm follows from; None where a kernel takes it."""
        return None if ops.runs_kernels(self.backprops) else self.unfinished_of(self.error())

    def unfinished_of(self, error: SumError | None) -> Unfinished:
        """The same with an error that is known."""
        few = self.shape[0] <= _WHOLE_TABLE * self.indices.shape[1] and self.device.type == "cpu" and not is_traced()
        if few or is_small_table(self.shape, self.dtype, self.device):
            return unfinished_norm(self._tables(), error)
        values, sample = self.segments()
        total = values.new_zeros(self.num_samples, dtype=torch.float64)
        sums.add_rows(total, sample, sums.row_sq_norm(values))
        numel = self.indices.shape[1] * self.shape[1]
        width = min(self.shape[1], sums.SUM_BLOCK) + bounds.summed_after(self.indices.shape[1], values.dtype)
        return Unfinished(total.sqrt_(), width, numel, values.dtype, error)

    def error(self) -> SumError:
        """How far the summed rows may be from the exact ones, in L2 norm."""
        rows = self.rows()
        positions, width = rows.shape[1:]
        terms = bounds.chain_terms(terms=positions, numel=positions * width, dtype=rows.dtype)
        return SumError((sums.raw_row_norm(rows),), (sums.lost_to_underflow(rows),), *terms)

    def materialized(self) -> Dense:
        return Dense(self.materialize(), error=self.error())

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        rows = self.rows()
        weights = towards_zero(coefficients, rows.dtype)
        c = weights.view(-1, 1, 1)
        scaled = rows * c
        if reference.drops_samples(weights):
            scaled = scaled.masked_fill(c == 0, 0.0)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return torch.ops.aten.embedding_dense_backward.default(scaled, self.indices, self.shape[0], padding, False)

    def taken(self, rows: Tensor | slice) -> Lookup:
        """Those samples alone."""
        return Lookup(take(self.indices, rows), take(self.backprops, rows), self.shape[0], self.padding_idx)

    def together(self, n: int) -> Lookup:
        """n samples, each of as many of these, one after the other."""
        indices, backprops = (x.unflatten(0, (n, -1)).flatten(1, 2) for x in (self.indices, self.backprops))
        return Lookup(indices, backprops, self.shape[0], self.padding_idx)

    def apart(self) -> Lookup:
        """A sample of each position."""
        indices, backprops = self.indices.flatten().unsqueeze(1), self.backprops.flatten(0, 1).unsqueeze(1)
        return Lookup(indices, backprops, self.shape[0], self.padding_idx)

    @property
    def device(self) -> torch.device:
        return self.backprops.device

    @property
    def dtype(self) -> torch.dtype:
        """Of sums."""
        return accumulating_dtype(self.backprops)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.indices.nbytes + self.backprops.nbytes

    def kept(self) -> Factor:
        return self


def _firsts_made(n: int, size: int, device: torch.device) -> Tensor:
    """(n, 1): 0, size, 2·size, ..."""
    return torch.arange(0, n * size, size, device=device).unsqueeze(1)


_firsts = lru_cache(maxsize=64)(_firsts_made)
