"""Layers that are alike as one: the factor of a parameter of each, one layer's samples after the other's.

A sample's numbers do not depend on the batch that it stands in, so the samples of several layers may stand in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import AnyNorm, SumError, Unfinished, ops, reference
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct


class Numbers(NamedTuple):
    """What a step works out of one parameter of layers alike, M samples; what else has to be known follows from shapes.

    Attributes:
        norm: of the gradients, (M,) fp64, as of ``Unfinished``.
        of: what its error follows from: the norms of a ``SumError``, or it is the error, (M,) fp64 or None.
        factor: the gradients, written out or what they are made from.
    """

    norm: Tensor
    of: tuple[Tensor, ...] | Tensor | None
    factor: Tensor | OuterProduct | Lookup


class Alike:
    """
    Args:
        factor: of the samples of all layers.
        layers: how many there are.
        norm: its norm, where that has been taken.
    """

    def __init__(self, factor: Factor, layers: int, norm: Unfinished | None = None):
        self.layers = layers
        if norm is not None:
            self.factor: Dense | OuterProduct | Lookup = factor  # type: ignore[assignment]  # by who knows the norm
            self.norm: AnyNorm = norm
            return
        kept = isinstance(factor, OuterProduct) and factor.keeps
        if kept or not isinstance(factor, (Dense, OuterProduct, Lookup)):
            factor = factor.materialized()
        self.factor = factor
        self.norm = factor.unfinished() or factor.sq_norm()  # while all is in the cache

    def numbers(self) -> Numbers | None:
        """None where more than shapes has to be known."""
        if not isinstance(self.norm, Unfinished):
            return None
        error, factor = self.norm.error, self.factor
        of = error.norms if isinstance(error, SumError) else error
        return Numbers(self.norm.norm, of, factor.values if isinstance(factor, Dense) else factor)

    def weighted_sums(self, coefficients: Tensor) -> Sequence[Tensor]:
        """``Σ_n c_n G_n`` of each layer, views of one tensor; c (n,) is the same for all."""
        factor, layers = self.factor, self.layers
        if not isinstance(factor, Dense):
            return sums_of_inputs(factor, layers, coefficients)
        rows = factor.values.reshape(layers, len(coefficients), -1)
        return ops.weighted_values(rows, coefficients).view(layers, *factor.shape).unbind()


def sums_of_inputs(factor: OuterProduct | Lookup, layers: int, coefficients: Tensor) -> Sequence[Tensor]:
    """:meth:`Alike.weighted_sums` of gradients that are not written out."""
    if layers == 1:
        return [factor.weighted_sum(coefficients)]
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


def sums_of_all_inputs(factor: OuterProduct | Lookup, layers: int, coefficients: Tensor) -> Sequence[Tensor]:
    """:func:`sums_of_inputs`, the same bits in fewer calls, on a CPU, of coefficients in fp32 of which none is 0."""
    if isinstance(factor, OuterProduct):
        a, b = factor.activations, factor.backprops
        if a.dtype is b.dtype is torch.float32 and not ops.runs_kernels(a, b):
            excess = ops.reference_excess(a, b)
            c = coefficients * (1.0 - excess) if excess else coefficients
            return [reference.sum_of_all(a, b, c)] if layers == 1 else reference.sums_of_all(a, b, c, layers).unbind()
    return sums_of_inputs(factor, layers, coefficients)
