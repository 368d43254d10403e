"""Layers that are alike as one: the factor of a parameter of each, one layer's samples after the other's.

A sample's numbers do not depend on the batch that it stands in, so the samples of several layers may stand in one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfast.arithmetic import SquaredNorm, Unfinished, accumulating_dtype, ops, reference
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.outer_product import OuterProduct


class Alike:
    """
    Args:
        factor: of the samples of all layers.
        layers: how many there are.
    """

    def __init__(self, factor: Factor, layers: int):
        if (isinstance(factor, OuterProduct) and factor.keeps) or not isinstance(factor, (Dense, OuterProduct)):
            factor = factor.materialized()
        self.factor = factor
        self.layers = layers
        self.norm: SquaredNorm | Unfinished = factor.unfinished() or factor.sq_norm()  # while all is in the cache

    def weighted_sums(self, coefficients: Tensor) -> Sequence[Tensor]:
        """``Σ_n c_n G_n`` of each layer, views of one tensor; c (n,) is the same for all."""
        factor, layers = self.factor, self.layers
        if layers == 1:
            return [factor.weighted_sum(coefficients)]
        if isinstance(factor, Dense):
            return self._of_values(factor.values, coefficients)
        a, b = (x.unflatten(0, (layers, -1)) for x in (factor.activations, factor.backprops))
        if ops.runs_kernels(a, b):
            return [OuterProduct(*ab).weighted_sum(coefficients) for ab in zip(a, b, strict=True)]
        excess = ops.sum_excess(a, b)
        c = coefficients * (1.0 - excess) if excess else coefficients
        return reference.weighted_sums(a, b, c).unbind()

    def _of_values(self, values: Tensor, coefficients: Tensor) -> Sequence[Tensor]:
        dtype = accumulating_dtype(values)
        rows = values.to(dtype).reshape(self.layers, len(coefficients), -1)
        return reference.weighted_values(rows, coefficients).view(self.layers, *values.shape[1:]).unbind()
