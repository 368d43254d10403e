"""Norms of many factors, and their bounds, worked out together.

What a layer's norm takes at last is done with N numbers: some twenty calls on next to nothing. So factors leave what
that follows from, and it is done once for all of them, row by row what :func:`bounds.dense` and
:func:`bounds.direct_error` do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import bounds, sums
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.precision import accumulating_dtype
from dpfast.arithmetic.row_norms import taken_once

_ENTRIES = 2**20
"""Row norms, of all factors and positions, that are worked on at a time: 8 MiB each time that they are written."""

_SLOP = 1.0 + 2.0**-40

_row_norm = sums.raw_row_norm
"""Of values: once, and of no input."""


class SumError(NamedTuple):
    """How far, in L2 norm, a sum over T positions may be from the exact one: ``relative·S + least`` with
    ``S = Σ_t Π_k (norms_k + lost_k)``, over the one or two things that are multiplied at a position."""

    norms: tuple[Tensor, ...]
    """Of the rows, (M, T) each, in any dtype."""

    lost: tuple[float, ...]
    """What each of them may lack where squares underflow."""

    relative: float
    least: float

    @classmethod
    def of_products(cls, activations: Tensor, backprops: Tensor) -> SumError:
        """Of the reference's gradients ``Σ_t b_t a_tᵀ`` of these inputs."""
        relative, least = bounds.direct_terms(
            positions=activations.shape[1],
            numel=activations.shape[2] * backprops.shape[2],
            dtype=accumulating_dtype(activations, backprops),
        )
        norms = (taken_once(sums.raw_row_norm, activations), taken_once(sums.raw_row_norm, backprops))
        return cls(norms, (sums.lost_to_underflow(activations), sums.lost_to_underflow(backprops)), relative, least)

    def bound(self) -> Tensor:
        """(M,) fp64."""
        return _sum_errors([self], self.norms[0].shape[0])[0]


class Unfinished(NamedTuple):
    """The norms of M values as computed.

    Attributes:
        norm: (M,) fp64; no sum of squares in ``dtype`` is longer than ``width``. 0: it bounds nothing by itself, the
            error is more than the exact norm.
        numel: entries of a value.
        error: how far the values themselves may be off, in L2 norm, (M,) fp64 or what that follows from.
    """

    norm: Tensor
    width: int
    numel: int
    dtype: torch.dtype
    error: Tensor | SumError | None

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def kind(self) -> tuple[int, int] | None:
        """Errors of one kind are worked out together, in fewest calls where they stand together; None: it is known."""
        error = self.error
        return (len(error.norms), error.norms[0].shape[1]) if isinstance(error, SumError) else None


def finish_norms(parts: Sequence[Unfinished], n: int) -> SquaredNorm:
    """‖v‖² and its upper bound for all of them, (F, n) with n > 0: each part's M is one or several times n, and they
    stand one after the other. A row's bits do not depend on the others."""
    norms = torch.cat([p.norm for p in parts]) if len(parts) > 1 else parts[0].norm
    value = norms.view(-1, n).square()
    layers = [p.norm.shape[0] // n for p in parts]
    relative, least, slop = norm_terms(parts, layers)
    upper = _scaled(value, relative, least).sqrt_().add_(_errors(parts, n)).square_()
    return SquaredNorm(value, upper.mul_(slop))


Column = Tensor | float
"""A number of each layer, (F, 1) or (F, 1, 1) fp64; a float where there is one layer, in a graph."""


def _scaled(x: Tensor, relative: Any, least: Any) -> Tensor:
    """``relative·x + least``"""
    return x * relative + least if isinstance(relative, float) else torch.addcmul(least, x, relative)


def norm_terms(parts: Sequence[Unfinished], layers: Sequence[int]) -> tuple[Column, Column, float]:
    """The columns of :func:`finish_norms`, relative to the square and what underflow can hide, and its last factor."""
    terms = [_dense_terms(p.width, p.numel, p.dtype) for p in parts]
    relative, least = _columns(terms, layers, parts[0].norm)
    return relative, least, _SLOP


def sum_error_columns(errors: Sequence[SumError], layers: Sequence[int]) -> Sequence[Column]:
    """What the norms of each may lack, (F, 1, 1), and its two numbers, (F, 1); the errors are of one kind."""
    *lost, relative, least = _columns([(*e.lost, e.relative, e.least) for e in errors], layers, errors[0].norms[0])
    return *(x.unsqueeze(-1) if isinstance(x, Tensor) else x for x in lost), relative, least


@lru_cache(maxsize=4096)
def _dense_terms(width: int, numel: int, dtype: torch.dtype) -> tuple[float, float]:
    return bounds.dense_terms(width=width, numel=numel, dtype=dtype) if width else (0.0, 0.0)


def unfinished_norm(blocks: Iterable[Tensor], error: Tensor | SumError | None = None) -> Unfinished:
    """Of values (M, ...) that come in blocks of samples, at least one, each used while it is in the cache."""
    found = []
    for block in blocks:
        rows = block if block.dim() == 2 else sums.rows_of_entries(block)
        found.append(_row_norm(rows))
    row_norms = found[0] if len(found) == 1 else torch.cat(found)
    norm = row_norms.double() if row_norms.dim() == 1 else sums.norm_of_rows(row_norms)
    width, numel = min(rows.shape[-1], sums.SUM_BLOCK), rows.shape[1:].numel()
    return Unfinished(norm, width, numel, accumulating_dtype(rows), error)


def unfinished_norms(values: Sequence[Tensor], errors: Sequence[Tensor | SumError | None]) -> list[Unfinished]:
    """Of values of one shape (M, ...) and dtype, contiguous, each with its error: all read together."""
    norm, width, numel, dtype, _ = unfinished_norm([torch.stack(tuple(values)).flatten(0, 1)])
    norms = norm.view(len(values), -1).unbind()
    return [Unfinished(own, width, numel, dtype, error) for own, error in zip(norms, errors, strict=True)]


class NormsOfLayers:
    """Norms of some layers' gradients (R, C), of a few samples at a time: all together, with the terms of the largest.
    What shapes tell is worked out once: between products no cache holds the lines of code for it.

    Args:
        shapes: of each layer's, whose rows stand one after the other. dtype: of all.
        errors: how far each gradient may be off, in L2 norm, (layers, N) fp64.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, errors: Tensor):
        widest = max(columns for _, columns in shapes)
        largest = Unfinished(errors, min(widest, sums.SUM_BLOCK), max(r * c for r, c in shapes), dtype, None)
        self._relative, self._least, self._slop = norm_terms([largest], [1])
        self._errors = errors
        self._stack = len({rows for rows, _ in shapes}) == 1
        plain = dtype is torch.float32 and widest <= sums.SUM_BLOCK
        self._row_norm = _rows_as_they_are if plain else _row_norm

    def __call__(self, values: Sequence[Sequence[Tensor]], samples: slice) -> SquaredNorm:
        """(layers, n), of the n samples' gradients, a layer's after the other's."""
        norms = []
        for of_sample in values:
            row_norms = list(map(self._row_norm, of_sample))
            if self._stack:
                norms.append(sums.norm_of_rows(torch.stack(row_norms)))
            else:
                norms.append(torch.stack([sums.norm_of_rows(rows) for rows in row_norms]))
        norm = torch.stack(norms, dim=1) if len(norms) > 1 else norms[0].unsqueeze(1)
        value = norm.square()
        upper = _scaled(value, self._relative, self._least).sqrt_().add_(self._errors[:, samples]).square_()
        return SquaredNorm(value, upper.mul_(self._slop))


_rows_as_they_are = partial(torch.linalg.vector_norm, dim=1)
"""``sums.raw_row_norm`` of fp32 (R, C) whose rows are no longer than one sum."""


def _errors(parts: Sequence[Unfinished], n: int) -> Tensor:
    """(F, n)"""
    alike: dict[Hashable, list[int]] = {}
    for i, part in enumerate(parts):
        alike.setdefault("none" if part.error is None else part.kind or i, []).append(i)
    blocks: list[tuple[list[int], Tensor]] = []
    for members in alike.values():
        of_sums: list[Any] = [e for i in members if isinstance(e := parts[i].error, SumError)]
        if of_sums:
            for some in _at_a_time(members, [e.norms[0].numel() for e in of_sums]):
                blocks.append((some, _sum_errors([of_sums[members.index(i)] for i in some], n)))
            continue
        norm, error = parts[members[0]].norm, parts[members[0]].error
        if error is None:
            blocks.append((members, norm.new_zeros(sum(parts[i].norm.shape[0] for i in members) // n, n)))
        elif isinstance(error, Tensor):
            blocks.append((members, error.view(-1, n)))
    if [i for members, _ in blocks for i in members] == list(range(len(parts))):
        return torch.cat([rows for _, rows in blocks]) if len(blocks) > 1 else blocks[0][1]
    found: dict[int, Tensor] = {}
    for members, rows in blocks:
        layers = [parts[i].norm.shape[0] // n for i in members]
        found.update(zip(members, rows.split(layers) if len(members) > 1 else [rows], strict=True))
    return torch.cat([found[i] for i in range(len(parts))])


def _at_a_time(members: Sequence[int], entries: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    total = 0
    for member, number in zip(members, entries, strict=True):
        if not found or total + number > _ENTRIES:
            found.append([])
            total = 0
        found[-1].append(member)
        total += number
    return found


def sum_bounds(errors: Sequence[SumError]) -> Tensor:
    """What each bounds, (F, M) fp64, of errors of as many values."""
    if len({(len(error.norms), error.norms[0].shape[1]) for error in errors}) > 1:
        return torch.stack([error.bound() for error in errors])
    n, places = errors[0].norms[0].shape[0], range(len(errors))
    some = _at_a_time(places, [error.norms[0].numel() for error in errors])
    return torch.cat([_sum_errors([errors[i] for i in members], n) for members in some])


def _sum_errors(errors: Sequence[SumError], n: int) -> Tensor:
    """(F, n), of errors with as many positions and norms."""
    layers = [e.norms[0].shape[0] // n for e in errors] if n else [1]
    return sum_errors([e.norms for e in errors], n, sum_error_columns(errors, layers))


def sum_errors(of: Sequence[Sequence[Tensor]], n: int, columns: Sequence[Column]) -> Tensor:
    """The same from their norms, with the :func:`sum_error_columns` of errors like these."""
    *lost, relative, least = columns
    product: Any = None
    for k, lost_k in enumerate(lost):
        norms = [norms[k] for norms in of]
        if len({x.dtype for x in norms}) > 1:
            norms = [x.double() for x in norms]
        rows = torch.cat(norms) if len(norms) > 1 else norms[0]
        rows = rows.view(rows.shape[0] // n if n else 1, n, rows.shape[1]).double() + lost_k
        product = rows if product is None else product.mul_(rows)
    return _scaled(product.sum(-1), relative, least)


def _columns(terms: Sequence[tuple[float, ...]], layers: Sequence[int], like: Tensor) -> Sequence[Column]:
    """The numbers of each part as columns (F, 1), fp64, as often as it has layers."""
    if type(like) is not Tensor:  # traced: nothing of it may stay
        if len(terms) == 1:  # a tensor would be one more that the graph is given
            return terms[0]
        return _made(tuple(terms), tuple(layers), like.device).unbind()
    return _kept_columns(tuple(terms), tuple(layers), like.device)


def table(terms: Sequence[tuple[float, ...]], layers: Sequence[int], like: Tensor) -> Tensor:
    """The same as one tensor, (numbers, F, 1)."""
    make = _kept if type(like) is Tensor else _made
    return make(tuple(terms), tuple(layers), like.device)


def _made(terms: tuple[tuple[float, ...], ...], layers: tuple[int, ...], device: torch.device) -> Tensor:
    rows = [numbers for numbers, times in zip(terms, layers, strict=True) for _ in range(times)]
    return torch.tensor(rows, dtype=torch.float64, device=device).t().unsqueeze(-1)


_kept = lru_cache(maxsize=256)(_made)
"""A GPU would be waited for each time that numbers go there."""


@lru_cache(maxsize=256)
def _kept_columns(
    terms: tuple[tuple[float, ...], ...], layers: tuple[int, ...], device: torch.device
) -> Sequence[Tensor]:
    return _made(terms, layers, device).unbind()
