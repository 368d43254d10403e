"""Outer products whose gradients are written sample by sample, for norm and clipped sum at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import SumError, Unfinished, buffers, norm_of_layers, reference
from dpfast.factors.outer_product import OuterProduct


class InTurn:
    """What outer products on a CPU can be once all other norms are known: one sample's gradients are written, their
    norms taken while they are in the cache, and times the factor that follows they are added to the sums from there.
    Nothing is kept, and the sums need no products of their own.

    Args:
        factors: of as many samples and one dtype; at least one factor, sample and position.
    """

    def __init__(self, factors: Sequence[OuterProduct]):
        self.dtype = factors[0].dtype
        self._layers = [_Layer(factor) for factor in factors]
        errors = [SumError.of_products(f.activations, f.backprops).bound() for f in factors]
        self._errors = torch.stack(errors, dim=1)  # how far each gradient may be from the exact one: (N, layers)

    @property
    def num_samples(self) -> int:
        return len(self._errors)

    def write(self, n: int) -> Unfinished:
        """The gradients of sample n; gives what their norms follow from, a layer's after the other's."""
        values = [layer.write(n, self.dtype) for layer in self._layers]
        return norm_of_layers(values, self._errors[n])

    def add(self, factor: float) -> None:
        """Adds the gradients that have been written, times ``factor``: with 0 exactly nothing, whatever they hold."""
        for layer in self._layers:
            layer.add(factor)

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
        self._rows, self._columns = rows.unbind(), columns.unbind()
        # The gradient of a sample, until the next one's is written: glibc would give the memory of all layers' back in
        # between, and fault it in again for each sample.
        self._values: Any = None
        self._total: Any = None

    def write(self, n: int, dtype: torch.dtype) -> Tensor:
        self._values = reference.gradient(self._rows[n], self._columns[n], dtype)
        return self._values

    def add(self, factor: float) -> None:
        if factor == 0.0:
            return
        if self._total is None:
            out = buffers.empty(self._values.shape, self._values.dtype, self._values.device)
            self._total = torch.mul(self._values, factor, out=out)
        else:
            self._total.add_(self._values, alpha=factor)

    def total(self, dtype: torch.dtype) -> Tensor:
        if self._total is None:  # all were dropped
            return torch.zeros(self._shape, dtype=dtype)
        if not self._transposed:
            return self._total
        return buffers.empty(tuple(self._shape), dtype, self._total.device).copy_(self._total.mT)
