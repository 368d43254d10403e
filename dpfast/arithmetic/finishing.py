"""What norms follow from, of whatever kind it is, made into norms: each kind together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.stacked_grams import UnfinishedGram, finish_grams
from dpfast.arithmetic.stacked_kernel_norms import (
    KernelDirect,
    KernelGram,
    KernelRankOne,
    finish_direct,
    finish_kernel_grams,
    finish_rank_one,
    rows_in_order,
)
from dpfast.arithmetic.stacked_norms import SumError, Unfinished, finish_norms, unfinished_norm
from dpfast.arithmetic.standardised_norms import UnfinishedStandardised, finish_standardised

AnyNorm = SquaredNorm | Unfinished | UnfinishedGram | UnfinishedStandardised | KernelDirect | KernelGram | KernelRankOne
"""Of M values, or what it follows from; M is a multiple of the number of samples where several layers stand in one."""


def finish(parts: Sequence[AnyNorm], n: int) -> SquaredNorm:
    """‖v‖² and its upper bound of all of them, (F, n) with n > 0, all on one device: each part's M is one or several
    times n, and they stand one after the other. A row's bits do not depend on the others."""
    of_kind: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        of_kind.setdefault(type(part), []).append(i)
    rows, order = [], []
    for kind, which in of_kind.items():
        rows.append(_finish(kind)([parts[i] for i in which], n))
        order += which
    value, upper = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*rows, strict=True))
    if order == sorted(order):
        return SquaredNorm(value, upper)
    layers = [_numbers(part).shape[-1] // n for part in parts]
    places = [sum(layers[:i]) + k for i in order for k in range(layers[i])]
    return SquaredNorm(*(rows_in_order(x, places) for x in (value, upper)))


def finished(part: AnyNorm) -> SquaredNorm:
    """Alone, (M,)."""
    n = _numbers(part).shape[-1]
    if not n:
        none = _numbers(part).new_zeros(0, dtype=torch.float64)
        return SquaredNorm(none, none.clone())  # results of an operation share no memory
    value, upper = finish([part], n)
    return SquaredNorm(value[0], upper[0])


def dense_sq_norm(blocks: Iterable[Tensor], error: Tensor | SumError | None = None) -> SquaredNorm:
    """‖v_n‖² of values (N, ...) as ``unfinished_norm`` takes them."""
    return finished(unfinished_norm(blocks, error))


def _numbers(part: AnyNorm) -> Tensor:
    """(..., M)"""
    if isinstance(part, UnfinishedGram):
        return part.totals
    if isinstance(part, Unfinished):
        return part.norm
    return part.value if isinstance(part, SquaredNorm) else part.numbers


def _finish(kind: type) -> Callable[[Any, int], SquaredNorm]:
    if kind is UnfinishedStandardised:
        return lambda parts, n: finish_standardised(parts, finish([part.inner for part in parts], n), n)
    if kind is SquaredNorm:
        return lambda parts, n: SquaredNorm(*(torch.cat(x).view(-1, n) for x in zip(*parts, strict=True)))
    return _OF_ONE_KIND[kind]


_OF_ONE_KIND: dict[type, Callable[[Any, int], SquaredNorm]] = {
    Unfinished: finish_norms,
    UnfinishedGram: finish_grams,
    KernelDirect: finish_direct,
    KernelGram: finish_kernel_grams,
    KernelRankOne: finish_rank_one,
}
