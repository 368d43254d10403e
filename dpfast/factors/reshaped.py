"""Factors made of other factors: another shape, or blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.patch_product import PatchProduct


class Reshaped:
    """The same entries in another shape.

    Args:
        factor: stands for gradients with as many entries.
        shape: the parameter's.
    """

    def __init__(self, factor: Factor, shape: torch.Size):
        self.factor = factor
        self.shape = torch.Size(shape)

    @property
    def num_samples(self) -> int:
        return self.factor.num_samples

    def materialize(self, scale: float = 1.0) -> Tensor:
        return self.factor.materialize(scale).view(self.num_samples, *self.shape)

    def sq_norm(self) -> SquaredNorm:
        return self.factor.sq_norm()

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return self.factor.weighted_sum(coefficients).view(self.shape)

    def materialized(self) -> Dense:
        dense = self.factor.materialized()
        return Dense(dense.values.view(self.num_samples, *self.shape), error=dense.error)

    def kept(self) -> Factor:
        return Reshaped(self.factor.kept(), self.shape)


class Blocks:
    """Gradients of a parameter whose rows are split into blocks, each with its own factor, in order."""

    def __init__(self, factors: Sequence[Factor]):
        self.factors = list(factors)
        rows = sum(f.shape[0] for f in self.factors)
        self.shape = torch.Size((rows, *self.factors[0].shape[1:]))

    @property
    def num_samples(self) -> int:
        return self.factors[0].num_samples

    def materialize(self, scale: float = 1.0) -> Tensor:
        return torch.cat([f.materialize(scale) for f in self.factors], dim=1)

    def sq_norm(self) -> SquaredNorm:
        norms = [f.sq_norm() for f in self.factors]
        slop = 1.0 + 2.0**-40
        value, upper = sum(n.value for n in norms), sum(n.upper for n in norms) * slop
        return SquaredNorm(value, upper)  # type: ignore[arg-type]  # there is a block

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return torch.cat([f.weighted_sum(coefficients) for f in self.factors])

    def materialized(self) -> Dense:
        parts = [f.materialized() for f in self.factors]
        squares = [p.error.square() for p in parts if p.error is not None]
        total: Any = sum(squares)
        error = total.sqrt() * (1.0 + 2.0**-40) if squares else None
        return Dense(torch.cat([p.values for p in parts], dim=1), error=error)

    def kept(self) -> Factor:
        return Blocks([f.kept() for f in self.factors])


def parts_of(factor: Factor) -> list[Factor]:
    """What it is made of: of another shape, of a weight before it was standardised, block by block."""
    inner = getattr(factor, "factor", None)
    if isinstance(factor, Reshaped) or isinstance(inner, PatchProduct):
        return parts_of(inner)  # type: ignore[arg-type]  # there is one
    if isinstance(factor, Blocks):
        return [part for block in factor.factors for part in parts_of(block)]
    return [factor]
