"""Outer products whose gradients are written a few samples at a time, for norm and clipped sum at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import NormsOfLayers, SquaredNorm, SumError, buffers, reference, sum_bounds
from dpfast.factors.outer_product import OuterProduct

AT_A_TIME = 4 * 2**20
"""Bytes of gradients that are written before they are added, at most, or those of one sample: what is done with their
norms takes as long for one sample as for some."""


class InTurn:
    """What outer products on a CPU can be once all other norms are known: gradients of a few samples are written, their
    norms taken while they are in the cache, and times the factors that follow they are added to the sums from there.
    Nothing is kept, and the sums need no products of their own.

    Args:
        factors: of as many samples and one dtype; at least one factor, sample and position.
    """

    def __init__(self, factors: Sequence[OuterProduct]):
        self.dtype = factors[0].dtype
        self._layers = [_Layer(factor) for factor in factors]
        self._n = factors[0].num_samples
        self._at_a_time = max(1, AT_A_TIME // sum(f.shape.numel() * f.dtype.itemsize for f in factors))
        errors = sum_bounds([SumError.of_products(f.activations, f.backprops) for f in factors])
        self._norms = NormsOfLayers([layer.written for layer in self._layers], self.dtype, errors)

    def samples(self) -> Iterator[slice]:
        """Those that are written, and added, at a time."""
        for start in range(0, self._n, self._at_a_time):
            yield slice(start, min(start + self._at_a_time, self._n))

    def write(self, samples: slice) -> SquaredNorm:
        """The gradients of these; gives their norms, (layers, n)."""
        values = [[layer.write(n) for layer in self._layers] for n in range(samples.start, samples.stop)]
        return self._norms(values, samples)

    def add(self, factors: Sequence[float]) -> None:
        """Adds the gradients that have been written, times the factors: with 0 exactly nothing, whatever they hold."""
        for layer in self._layers:
            layer.add(factors)

    def totals(self) -> list[Tensor]:
        """The clipped sums, (P, D) each; asked once."""
        layers, self._layers = self._layers, []
        layers.reverse()
        return [layers.pop().total(self.dtype) for _ in range(len(layers))]


class _Layer:
    def __init__(self, factor: OuterProduct):
        self._shape = factor.shape
        self._transposed = factor.shape[1] < factor.shape[0]
        rows, columns = factor.backprops, factor.activations
        if self._transposed:  # rows of the smaller matrix are what costs less: see products.onednn
            rows, columns = columns, rows
        self.written = rows.shape[2], columns.shape[2]
        self._gradient = reference.gradients(rows, columns, factor.dtype)
        # Gradients of samples, until the next ones are written: glibc would give the memory of all layers' back in
        # between, and fault it in again each time.
        self._values: list[Tensor] = []
        self._are_added = True
        self._total: Any = None

    def write(self, n: int) -> Tensor:
        values = self._gradient(n)
        if self._are_added:
            self._values, self._are_added = [], False
        self._values.append(values)
        return values

    def add(self, factors: Sequence[float]) -> None:
        self._are_added = True
        for values, factor in zip(self._values, factors, strict=True):
            if factor == 0.0:
                continue
            if self._total is None:
                out = buffers.empty(values.shape, values.dtype, values.device)
                self._total = torch.mul(values, factor, out=out)
            else:
                self._total.add_(values, alpha=factor)

    def total(self, dtype: torch.dtype) -> Tensor:
        if self._total is None:  # all were dropped
            return torch.zeros(self._shape, dtype=dtype)
        if not self._transposed:
            return self._total
        return buffers.empty(tuple(self._shape), dtype, self._total.device).copy_(self._total.mT)
