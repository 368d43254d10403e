"""Norms of many factors from what kernels' programs have left: added up in one launch for each length, and what is left
to do with N numbers done for all together, as in ``stacked_norms``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import bounds
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.precision import smallest_normal
from dpfast.arithmetic.stacked_grams import finish_totals
from dpfast.arithmetic.stacked_norms import table

_SLOP = 1.0 + 2.0**-40

Added = Callable[[Tensor], Tensor]
"""Rows (R, L) to their sums (R,), each in an order fixed by L alone: ``kernels.sum_partials``."""


class KernelDirect(NamedTuple):
    """What the norms of M gradients follow from, and their errors.

    Attributes:
        squares: what adds up to ‖Ĝ‖², (M, ·) fp32.
        products: what adds up to Σ_t ‖a_t‖‖b_t‖, (M, ·) fp32.
        terms: ``bounds.dense_terms`` and ``bounds.direct_terms``.
        added: what adds them up.
    """

    squares: Tensor
    products: Tensor
    terms: tuple[float, ...]
    added: Added

    @property
    def numbers(self) -> Tensor:
        """(..., M)"""
        return self.squares[:, 0]

    @property
    def device(self) -> torch.device:
        return self.squares.device

    def error(self) -> Tensor:
        """How far each Ĝ may be off in L2 norm, (M,) fp64."""
        _, _, relative, least = self.terms
        return self.added(self.products).double() * relative + least


class KernelGram(NamedTuple):
    """What the norms of M gradients follow from.

    Attributes:
        partials: (M, 4, ·) fp32, ``kernels.gram_partials``.
        norms: ‖a_t‖ and ‖b_t‖, (M, T) fp32 each, upper bounds but for their own rounding.
        terms: ``bounds.gram_terms``.
        added: what adds them up.
    """

    partials: Tensor
    norms: tuple[Tensor, Tensor]
    terms: tuple[float, ...]
    added: Added

    @property
    def numbers(self) -> Tensor:
        return self.partials[:, 0, 0]

    @property
    def device(self) -> torch.device:
        return self.partials.device


class KernelRankOne(NamedTuple):
    """What the norms of M gradients ``b aᵀ`` follow from: ‖a‖² and ‖b‖² as computed, (M,) fp32 each.

    Attributes:
        terms: ``bounds.dense_terms`` of both.
    """

    squares: tuple[Tensor, Tensor]
    terms: tuple[float, ...]

    @property
    def numbers(self) -> Tensor:
        return self.squares[0]

    @property
    def device(self) -> torch.device:
        return self.squares[0].device


def finish_direct(parts: Sequence[KernelDirect], n: int) -> SquaredNorm:
    """‖G‖² and its upper bound for all of them, (F, n) with n > 0, as ``stacked_norms.finish_norms``: row by row what
    :func:`bounds.dense` does with :func:`bounds.direct_error`."""
    found = _added([p.squares for p in parts] + [p.products for p in parts], n, parts[0].added)
    squares, products = found.double().unflatten(0, (2, -1)).unbind()
    relative, least, of_products, least_error = table([p.terms for p in parts], _layers(parts, n), squares).unbind()
    error = torch.addcmul(least_error, products, of_products)
    upper = torch.addcmul(least, squares, relative).sqrt_().add_(error).square_()
    return SquaredNorm(squares, upper.mul_(_SLOP))


def finish_kernel_grams(parts: Sequence[KernelGram], n: int) -> SquaredNorm:
    """The same, row by row what :func:`bounds.gram` does."""
    sums = _added([p.partials for p in parts], n, parts[0].added).double()  # (F, n, 4)
    norms = _row_sums([p.norms for p in parts], n, parts[0].added)
    totals = torch.cat([sums.movedim(2, 0), norms])
    return finish_totals(totals, [p.terms for p in parts], _layers(parts, n))


def finish_rank_one(parts: Sequence[KernelRankOne], n: int) -> SquaredNorm:
    """The same, row by row what :func:`bounds.rank_one` does."""
    squares = torch.cat([s for i in range(2) for s in (p.squares[i] for p in parts)]).view(2, -1, n).double()
    terms = table([p.terms for p in parts], _layers(parts, n), squares)
    upper = torch.addcmul(terms[1::2], squares, terms[0::2]).prod(0)
    # The product of two squares may be below all numbers of fp64, where the norm itself is not.
    return SquaredNorm(squares.prod(0), upper.mul_(_SLOP**3).add_(smallest_normal(torch.float64)))


def _layers(parts: Sequence[KernelDirect | KernelGram | KernelRankOne], n: int) -> list[int]:
    return [p.numbers.shape[0] // n for p in parts]


def _added(blocks: Sequence[Tensor], n: int, added: Added) -> Tensor:
    """(M, ..., L) each to the sums over L, (F, n, ...), the blocks' rows one after the other; as many calls as there
    are lengths."""
    inner = blocks[0].shape[1:-1]
    alike: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        alike.setdefault(block.shape[-1], []).append(i)
    sums, places = [], []
    layers = [block.shape[0] // n for block in blocks]
    starts = [sum(layers[:i]) for i in range(len(blocks))]
    for length, which in alike.items():
        rows = torch.cat([blocks[i] for i in which]) if len(which) > 1 else blocks[which[0]]
        sums.append(added(rows.reshape(-1, length)).view(-1, n, *inner))
        places += [starts[i] + k for i in which for k in range(layers[i])]
    together = torch.cat(sums) if len(sums) > 1 else sums[0]
    return rows_in_order(together, places)


def rows_in_order(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Those of the lowest place first."""
    if list(places) == sorted(places):
        return rows
    return rows.index_select(0, _order(tuple(places), rows.device))


@lru_cache(maxsize=256)
def _order(places: tuple[int, ...], device: torch.device) -> Tensor:
    """A GPU would be waited for each time."""
    return torch.tensor(sorted(range(len(places)), key=places.__getitem__), device=device)


def _row_sums(norms: Sequence[tuple[Tensor, Tensor]], n: int, added: Added) -> Tensor:
    """Σ_t ‖a_t‖, Σ_t ‖b_t‖ and Σ_t ‖a_t‖‖b_t‖, (3, F, n) fp64."""
    found = []
    for a, b in _of_one_length(norms):
        rows = torch.cat([a, b]).double().view(2, *a.shape)
        found.append(torch.cat([rows, rows.prod(0, keepdim=True)]))
    sums = [added(rows.flatten(0, 1)).view(3, -1, n) for rows in found]
    if len(sums) == 1:
        return sums[0]
    lengths = [a.shape[1] for a, _ in norms]
    order = [i for length in dict.fromkeys(lengths) for i, own in enumerate(lengths) if own == length]
    layers = [a.shape[0] // n for a, _ in norms]
    places = [sum(layers[:i]) + k for i in order for k in range(layers[i])]
    return torch.cat(sums, 1).index_select(1, _order(tuple(places), sums[0].device))


def _of_one_length(norms: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Those of layers with as many positions, together; the lengths in the order in which they come first."""
    alike: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for pair in norms:
        alike.setdefault(pair[0].shape[1], []).append(pair)
    return [tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in alike.values()]  # type: ignore[misc]


@lru_cache(maxsize=4096)
def direct_terms(*, width: int, numel: int, positions: int, chain: int) -> tuple[float, ...]:
    """Of a :class:`KernelDirect` in fp32."""
    return (
        *bounds.dense_terms(width=width, numel=numel, dtype=torch.float32),
        *bounds.direct_terms(positions=positions, numel=numel, dtype=torch.float32, kernel_chain=chain),
    )


@lru_cache(maxsize=4096)
def gram_terms(*, t: int, d: int, p: int, row: int, chain: int) -> tuple[float, ...]:
    """Of a :class:`KernelGram` in fp32."""
    return bounds.gram_terms((t, d, p), row=row, dtype=torch.float32, kernel_chain=chain)
