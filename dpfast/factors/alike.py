"""Layers that are alike as one: the factor of a parameter of each, one layer's samples after the other's.

A sample's numbers do not depend on the batch that it stands in, so the samples of several layers may stand in one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, Unfinished, accumulating_dtype, ops, reference
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct

SMALL = 1024
"""Entries of a layer's gradient up to which a copy of it takes less than a call."""


class Alike:
    """
    Args:
        factor: of the samples of all layers.
        layers: how many there are.
        norm: its norm, where that has been taken.
    """

    def __init__(self, factor: Factor, layers: int, norm: Unfinished | None = None):
        self.layers = layers
        self.beyond = 0  # bytes that are kept although their inputs are less
        if norm is not None:
            self.factor: Dense | OuterProduct | Lookup = factor  # type: ignore[assignment]  # by who knows the norm
            self.norm: SquaredNorm | Unfinished = norm
            return
        kept = isinstance(factor, OuterProduct) and factor.keeps
        if kept or not isinstance(factor, (Dense, OuterProduct, Lookup)):
            factor = factor.materialized()
        self.factor = factor
        self.norm = factor.unfinished() or factor.sq_norm()  # while all is in the cache

    def weighted_sums(self, coefficients: Tensor) -> Sequence[Tensor]:
        """``Σ_n c_n G_n`` of each layer, views of one tensor; c (n,) is the same for all."""
        factor, layers = self.factor, self.layers
        if isinstance(factor, Dense):
            return [factor.weighted_sum(coefficients)] if layers == 1 else self._of_values(factor.values, coefficients)
        if isinstance(factor, Lookup):
            n = len(coefficients)
            return [factor.taken(slice(i * n, i * n + n)).weighted_sum(coefficients) for i in range(layers)]
        a, b = factor.activations, factor.backprops
        if ops.runs_kernels(a, b):
            both = (x.unflatten(0, (layers, -1)) for x in (a, b))
            return [OuterProduct(*ab).weighted_sum(coefficients) for ab in zip(*both, strict=True)]
        excess = ops.reference_excess(a, b)
        c = coefficients * (1.0 - excess) if excess else coefficients
        return reference.weighted_sums(a, b, c, layers).unbind()

    def _of_values(self, values: Tensor, coefficients: Tensor) -> Sequence[Tensor]:
        dtype = accumulating_dtype(values)
        rows = values.to(dtype).reshape(self.layers, len(coefficients), -1)
        return reference.weighted_values(rows, coefficients).view(self.layers, *values.shape[1:]).unbind()


def weighted_sums(alikes: Sequence[Alike], coefficients: Tensor) -> list[Sequence[Tensor]]:
    """Each one's :meth:`Alike.weighted_sums`; those of small gradients, which are written out, by one product of a row
    with a matrix."""
    found: list[Sequence[Tensor]] = [()] * len(alikes)
    small: list[tuple[int, Tensor]] = []
    for i, alike in enumerate(alikes):
        values = alike.factor.values if isinstance(alike.factor, Dense) else None
        if values is not None and values.shape[1:].numel() <= SMALL and values.dtype is coefficients.dtype:
            small.append((i, values))
        else:
            found[i] = alike.weighted_sums(coefficients)
    if small:
        n = len(coefficients)
        rows = [row for i, values in small for row in values.reshape(alikes[i].layers, n, -1).unbind()]
        total = reference.weighted_rows([torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]], coefficients)
        sums = iter(total.split([row.shape[1] for row in rows]))
        for i, values in small:
            shape = values.shape[1:]
            found[i] = [next(sums).view(shape) if len(shape) > 1 else next(sums) for _ in range(alikes[i].layers)]
    return found
