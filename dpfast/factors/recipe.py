"""What a rule makes of layers alike, learned from its answer: outer products of the two tensors that they have caught,
look-ups by the one, and what a rule says how to make again. Of such layers shapes tell the rest, so it is worked out
once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
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
from dpfast.factors.dense import Again, Dense, Factor
from dpfast.factors.lookup import Lookup, is_small_table
from dpfast.factors.outer_product import OuterProduct


class _Part(NamedTuple):
    """Of one parameter.

    Attributes:
        again: what makes it; None for outer products and look-ups.
        table: of a look-up, its rows. swapped: of a product, with the gradient in the activations' place.
        keeps: it is written out. lost, relative, least: of its error, see ``SumError``. nbytes: of a sample's.
    """

    again: Again | None
    table: int
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
        self._takes_products = any(part.again is None and not part.table for part in parts)

    @classmethod
    def learned(cls, factors: Sequence[Factor], a: Tensor, b: Tensor) -> Recipe | None:
        """From what a rule, which looks at no values, has answered for these; None where it has to be asked again."""
        if is_traced() or b.dim() != 3 or a.dim() < 2 or a.shape[1] < 2 or ops.runs_kernels(b):
            return None
        parts = [_part(factor, a, b) for factor in factors]
        return None if None in parts else cls([part for part in parts if part is not None])

    def made(self, a: Tensor, b: Tensor, layers: int, room: int = 0) -> list[Alike]:
        """What :class:`Alike` makes of the rule's answer, the same bits.

        Args:
            room: bytes of gradients that may be kept beyond those that it keeps: sums of them are less calls.
        """
        norm_b = taken_once(sums.raw_row_norm, b)
        norms = (taken_once(sums.raw_row_norm, a), norm_b) if self._takes_products else (norm_b,)
        found = []
        for again, table, swapped, keeps, lost, relative, least, nbytes in self._parts:
            if again is not None:
                values, of = again(a, b, norm_b)
                error = SumError(of, lost, relative, least)
                found.append(Alike(Dense(values, error), layers, norm_of_values([values], error)))
                continue
            error = SumError((norm_b,) if table else norms, lost, relative, least)
            kept = keeps or len(a) * nbytes <= room
            factor: Lookup | OuterProduct
            if table:
                factor = Lookup(a, b, table)
                values = factor.table()
                norm = norm_of_values([values], error)
            else:
                x, y = (b, a) if swapped else (a, b)
                if not kept:
                    found.append(Alike(OuterProduct.of_rows(x, y), layers, ops.direct_norm(x, y, error)))
                    continue
                values = reference.grad_sample(x, y)
                norm = norm_of_values([values], error) if keeps else unfinished_of_products(values, error)
            found.append(Alike(Dense(values, error) if kept else factor, layers, norm))
            if kept and not keeps:
                found[-1].beyond = values.nbytes
                room -= values.nbytes
        return found


def _part(factor: Factor, a: Tensor, b: Tensor) -> _Part | None:
    if isinstance(factor, Dense):
        return _made_again(factor, a, b)
    if isinstance(factor, Lookup):
        small = is_small_table(factor.shape, factor.dtype, factor.device)
        if factor.of != (id(a), id(b)) or factor.padding_idx is not None or not small:
            return None
        error = factor.error()
        nbytes = factor.shape.numel() * factor.dtype.itemsize
        return _Part(None, factor.shape[0], False, False, *error[1:], nbytes)
    if not isinstance(factor, OuterProduct) or a.dim() != 3:
        return None
    x, y = factor.activations, factor.backprops
    if not ((x is a and y is b) or (x is b and y is a)) or not (factor.keeps or ops.norm_way(x, y) == "direct"):
        return None
    dtype = accumulating_dtype(a, b)
    terms = bounds.direct_terms(positions=a.shape[1], numel=a.shape[2] * b.shape[2], dtype=dtype)
    lost, nbytes = (sums.lost_to_underflow(a), sums.lost_to_underflow(b)), a.shape[2] * b.shape[2] * dtype.itemsize
    return _Part(None, 0, x is b, factor.keeps, lost, *terms, nbytes)


def _made_again(factor: Dense, a: Tensor, b: Tensor) -> _Part | None:
    if factor.again is None or factor.of not in ((id(a), id(b)), (0, id(b))):
        return None
    error = factor.settled()
    if not isinstance(error, SumError):
        return None
    values, _ = factor.again(a, b, taken_once(sums.raw_row_norm, b))
    if not torch.equal(values, factor.values):  # as where there is a NaN
        return None
    return _Part(factor.again, 0, False, True, *error[1:], 0)
