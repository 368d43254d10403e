"""What a rule makes of layers alike, learned from its answer: outer products of the two tensors that they have caught,
look-ups by the one, and what a rule says how to make again. Of such layers shapes tell the rest, so it is worked out
once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import (
    SumError,
    Unfinished,
    bounds,
    is_traced,
    ops,
    products,
    rank_one_norm,
    reference,
    sums,
    taken_once,
    unfinished_norm,
    unfinished_of_products,
)
from dpfast.factors.alike import Alike, Numbers
from dpfast.factors.dense import Again, Dense, Factor
from dpfast.factors.lookup import Lookup, is_small_table
from dpfast.factors.outer_product import OuterProduct


class _Part(NamedTuple):
    """Of one parameter.

    Attributes:
        again: what makes it; None for outer products and look-ups.
        table: of a look-up, its rows; else 0.
        swapped: of a product, with the gradient in the activations' place.
        keeps: it is written out, whatever room there is. nbytes: of a sample that is written, where it is no sum of
            rows.
        at_once: up to how many samples the product is ``torch.bmm`` and nothing else.
        error: numbers of its ``SumError``, without the norms. norm: those of its ``Unfinished``, likewise.
    """

    again: Again | None
    table: int
    swapped: bool
    keeps: bool
    nbytes: int
    at_once: int
    error: tuple[tuple[float, ...], float, float] | None
    norm: tuple[int, int, torch.dtype]


class Recipe:
    """For tensors (M, T, ·) of the shapes and dtypes of those that it was learned from, whatever M is; (M, ·) where T
    is 1.

    Attributes:
        held: bytes of a sample's gradients that are written out, sums of rows not counted.
    """

    def __init__(self, parts: Sequence[_Part], rank_one: bool):
        self._parts, self._rank_one = parts, rank_one
        self._takes_products = any(part.again is None and not part.table for part in parts)
        self.held = sum(part.nbytes for part in parts if part.keeps)

    @classmethod
    def learned(cls, factors: Sequence[Factor], a: Tensor, b: Tensor) -> Recipe | None:
        """From what a rule, which looks at no values, has answered for these; None where it has to be asked again."""
        t = a.shape[1] if b.dim() == 3 and a.dim() > 1 else 1 if b.dim() == a.dim() == 2 else 0
        if not t or is_traced() or ops.runs_kernels(b):
            return None
        parts = [_part(factor, a, b) for factor in factors]
        return None if None in parts else cls([part for part in parts if part is not None], t == 1)

    def numbers(self, a: Tensor, b: Tensor, room: int = 0) -> tuple[list[Numbers], int]:
        """What :class:`Alike` works out of the rule's answer, the same bits, and the room that is left.

        Args:
            room: bytes of gradients that may be kept beyond those that it keeps: sums of them are less calls.
        """
        if b.dim() == 2:
            a, b = a.unsqueeze(1), b.unsqueeze(1)
        norm_b, count, threads = _row_norm(b), b.shape[0], torch.get_num_threads()
        norms = (_row_norm(a), norm_b) if self._takes_products else (norm_b,)
        found = []
        for again, table, swapped, keeps, nbytes, at_once, error, _ in self._parts:
            if again is not None:
                values, of = again(a, b, norm_b)
                found.append(Numbers(_norm(values), of or None, values))
                continue
            kept = keeps
            if not kept and not self._rank_one and count * nbytes <= room:
                kept, room = True, room - count * nbytes
            if table:
                lookup = Lookup(a, b, table)
                table_of_all = lookup.table() if kept else None
                unfinished = lookup.unfinished_of(None) if table_of_all is None else unfinished_norm([table_of_all])
                found.append(Numbers(unfinished.norm, norms, lookup if table_of_all is None else table_of_all))
                continue
            x, y = (b, a) if swapped else (a, b)
            if not kept:
                direct = None if self._rank_one else SumError(norms, *error)  # type: ignore[misc]  # it has one
                norm = rank_one_norm(*norms) if direct is None else ops.direct_norm(x, y, direct).norm
                found.append(Numbers(norm, norms, OuterProduct.of_rows(x, y)))
                continue
            few = threads <= count <= at_once
            values = torch.bmm(y.mT, x) if few else reference.grad_sample(x, y)
            unfinished = unfinished_norm([values]) if keeps else unfinished_of_products(values)
            found.append(Numbers(unfinished.norm, norms, values))
        return found, room

    def alikes(self, numbers: Sequence[Numbers], layers: int) -> list[Alike]:
        """What :class:`Alike` makes of it."""
        found = []
        for part, (norm, of, factor) in zip(self._parts, numbers, strict=True):
            error = None if part.error is None else SumError(of, *part.error)  # type: ignore[arg-type]  # norms
            whole = Dense(factor, error) if isinstance(factor, Tensor) else factor
            found.append(Alike(whole, layers, Unfinished(norm, *part.norm, error)))
        return found


def _row_norm(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.shape[2] <= sums.SUM_BLOCK and x.numel() < _WORTH_LOOKING:
        return torch.linalg.vector_norm(x, dim=2)  # as below
    return taken_once(sums.raw_row_norm, x)


_WORTH_LOOKING = 2**14
"""Entries up to which norms take less than looking whether they have been taken, as in ``row_norms``."""


def _norm(values: Tensor) -> Tensor:
    if values.dim() == 2 and values.shape[1] <= sums.SUM_BLOCK and values.dtype is torch.float32:
        return torch.linalg.vector_norm(values, dim=1).double()  # as below
    return unfinished_norm([values]).norm


def _part(factor: Factor, a: Tensor, b: Tensor) -> _Part | None:
    of = id(a), id(b)
    if isinstance(factor, Dense):
        return _made_again(factor, a, b) if factor.of in (of, (0, id(b))) else None
    if isinstance(factor, Lookup):
        if factor.of != of or b.dim() == 2 or factor.padding_idx is not None:
            return None
        error, norm = _known(factor.unfinished())
        most = _nbytes(factor) if is_small_table(factor.shape, factor.dtype, factor.device) else sys.maxsize
        return _Part(None, factor.shape[0], False, False, most, 0, error, norm)
    if not isinstance(factor, OuterProduct) or a.dim() != b.dim() or factor.of not in (of, of[::-1]):
        return None
    x, y = factor.activations, factor.backprops
    # One sample's, which tell as much as all: a block for these would stay for good.
    made = factor.taken(slice(0, 1)).materialized() if factor.keeps else factor
    unfinished = made.unfinished()
    if not isinstance(unfinished, Unfinished):
        return None
    plain = x.dtype is y.dtype is torch.float32 and x.shape[1] <= bounds.CHAIN_BLOCK
    at_once = products.at_once(y.shape[2], y.shape[1], x.shape[2], x) if plain else 0
    swapped, (error, norm) = factor.of != of, _known(unfinished)
    if swapped and error is not None:  # what norms may lack stands as they do in ``numbers``
        error = error[0][::-1], *error[1:]
    return _Part(None, 0, swapped, factor.keeps, _nbytes(factor), at_once, error, norm)


def _nbytes(factor: OuterProduct | Lookup) -> int:
    return factor.shape.numel() * factor.dtype.itemsize


def _known(
    norm: object,
) -> tuple[tuple[tuple[float, ...], float, float] | None, tuple[int, int, torch.dtype]]:
    assert isinstance(norm, Unfinished) and not isinstance(norm.error, Tensor)
    return None if norm.error is None else norm.error[1:], (norm.width, norm.numel, norm.dtype)


def _made_again(factor: Dense, a: Tensor, b: Tensor) -> _Part | None:
    if factor.again is None or isinstance(factor.settled(), Tensor):
        return None
    a, b = (a.unsqueeze(1), b.unsqueeze(1)) if b.dim() == 2 else (a, b)
    values, _ = factor.again(a, b, taken_once(sums.raw_row_norm, b))
    if not _are_the_same(values, factor.values):
        return None
    error, norm = _known(factor.unfinished())
    return _Part(factor.again, 0, False, True, 0, 0, error, norm)


def _are_the_same(x: Tensor, y: Tensor) -> bool:
    """To the last bit; NaN stands where NaN does."""
    alike = x.shape == y.shape and x.dtype is y.dtype
    return alike and torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True)
