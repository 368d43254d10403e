"""What a rule makes of layers alike, learned from its answer: outer products of the two tensors that they have caught,
and sums of the gradient's rows. Of such layers shapes tell the rest, so it is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dpfast.arithmetic import (
    SumError,
    accumulating_dtype,
    bounds,
    is_traced,
    ops,
    reference,
    sums,
    taken_once,
    unfinished_of_products,
)
from dpfast.arithmetic import unfinished_norm as norm_of_values
from dpfast.factors.alike import Alike
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.outer_product import OuterProduct


class _Part(NamedTuple):
    """Of one parameter.

    Attributes:
        is_product: else it is the sum of the gradient's rows. swapped: with the gradient in the activations' place.
        keeps: it is written out. lost, relative, least: of its error, see ``SumError``. nbytes: of a sample's.
    """

    is_product: bool
    swapped: bool
    keeps: bool
    lost: tuple[float, ...]
    relative: float
    least: float
    nbytes: int


class Recipe:
    """For tensors (M, T, ·) of the shapes and dtypes of those that it was learned from, whatever M is."""

    def __init__(self, parts: Sequence[_Part]):
        self._parts = parts

    @classmethod
    def learned(cls, factors: Sequence[Factor], a: Tensor, b: Tensor) -> Recipe | None:
        """From what a rule, which looks at no values, has answered for these; None where it has to be asked again."""
        if is_traced() or a.dim() != 3 or b.dim() != 3 or a.shape[1] < 2 or ops.runs_kernels(a, b):
            return None
        parts = [_part(factor, a, b) for factor in factors]
        return None if None in parts else cls([part for part in parts if part is not None])

    def made(self, a: Tensor, b: Tensor, layers: int, room: int = 0) -> list[Alike]:
        """What :class:`Alike` makes of the rule's answer, the same bits.

        Args:
            room: bytes of gradients that may be kept beyond those that it keeps: sums of them are less calls.
        """
        norm_a, norm_b = taken_once(sums.raw_row_norm, a), taken_once(sums.raw_row_norm, b)
        norms, of_sum = (norm_a, norm_b), (norm_b,)
        found = []
        for is_product, swapped, keeps, lost, relative, least, nbytes in self._parts:
            if not is_product:
                error = SumError(of_sum, lost, relative, least)
                values = reference.bias_grad_sample(b)
                found.append(Alike(Dense(values, error), layers, norm_of_values([values], error)))
                continue
            x, y = (b, a) if swapped else (a, b)
            error = SumError(norms, lost, relative, least)
            if keeps:
                values = reference.grad_sample(x, y)
                found.append(Alike(Dense(values, error), layers, norm_of_values([values], error)))
            elif len(a) * nbytes <= room:
                values = reference.grad_sample(x, y)
                found.append(Alike(Dense(values, error), layers, unfinished_of_products(values, error)))
                found[-1].beyond = values.nbytes
            else:
                found.append(Alike(OuterProduct.of_rows(x, y), layers, ops.direct_norm(x, y, error)))
        return found


def _part(factor: Factor, a: Tensor, b: Tensor) -> _Part | None:
    if isinstance(factor, Dense) and factor.sum_of == id(b):
        terms = bounds.chain_terms(terms=b.shape[1], numel=b.shape[2], dtype=accumulating_dtype(b))
        return _Part(False, False, True, (sums.lost_to_underflow(b),), *terms, 0)
    if not isinstance(factor, OuterProduct):
        return None
    x, y = factor.activations, factor.backprops
    if not ((x is a and y is b) or (x is b and y is a)) or not (factor.keeps or ops.norm_way(x, y) == "direct"):
        return None
    dtype = accumulating_dtype(a, b)
    terms = bounds.direct_terms(positions=a.shape[1], numel=a.shape[2] * b.shape[2], dtype=dtype)
    lost, nbytes = (sums.lost_to_underflow(a), sums.lost_to_underflow(b)), a.shape[2] * b.shape[2] * dtype.itemsize
    return _Part(True, x is b, factor.keeps, lost, *terms, nbytes)
