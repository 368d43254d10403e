"""The norms of many factors, what is left to do with N numbers done for all at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import (
    AnyNorm,
    PairCalls,
    SquaredNorm,
    Unfinished,
    UnfinishedStandardised,
    bounds,
    finish,
    finished,
    is_traced,
    rows_in_order,
    unfinished_norms,
)
from dpfast.factors.dense import Dense, Factor, InBlocks
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.patch_product import PatchProduct
from dpfast.factors.standardised import Standardised


def norm_or_unfinished(factor: Factor) -> AnyNorm:
    """Its norm, or what that follows from."""
    if isinstance(factor, (Dense, InBlocks, Lookup, OuterProduct, PatchProduct, Standardised)) and factor.num_samples:
        return factor.unfinished() or factor.sq_norm()
    return factor.sq_norm()


def norms_or_unfinished(factors: Sequence[Factor]) -> list[AnyNorm]:
    """:func:`norm_or_unfinished` of each; on a CPU the same bits. Where launches are what a norm takes, small gradients
    of one shape (biases, scales of norms) are copied into one tensor and read together: as many threads of a GPU add up
    a row as the number of rows leaves, so its last bits may be others. The bounds hold for any."""
    alike: dict[Hashable, list[int]] = {}
    found: dict[int, AnyNorm] = {}
    for i, factor in enumerate(factors):
        kind = _stacks(factor) if type(factor) is Dense else None
        if kind is None:
            found[i] = norm_or_unfinished(factor)
        else:
            alike.setdefault(kind, []).append(i)
    for which in alike.values():
        if len(which) == 1:
            found[which[0]] = norm_or_unfinished(factors[which[0]])
            continue
        some: list[Any] = [factors[i] for i in which]
        most = max(1, _AT_ONCE // some[0].values.nbytes)
        for first in range(0, len(some), most):
            of = some[first : first + most]
            norms = unfinished_norms([f.values for f in of], [f.settled() for f in of])
            found.update(zip(which[first:], norms, strict=False))
    return [found[i] for i in range(len(factors))]


def norms_of_kinds(factors: Sequence[Factor]) -> list[tuple[list[int], AnyNorm]]:
    """Of layers alike of which enough is known, together: which of the factors theirs are, one after the other, and
    what their norms follow from, the same bits. :func:`norms_or_unfinished` is for the others."""
    alike: dict[PairCalls, list[int]] = {}
    for i, factor in enumerate(factors):
        if type(factor) is OuterProduct and factor.calls is not None:
            alike.setdefault(factor.calls, []).append(i)
    found: list[tuple[list[int], AnyNorm]] = []
    for calls, which in alike.items():
        some: list[Any] = [factors[i] for i in which]
        norm = calls.unfinished([(f.activations, f.backprops) for f in some])
        if norm is not None:
            found.append((which, norm))
    return found


STACKED = {"cuda": 2**20}
"""Bytes of a parameter's gradients up to which they are copied beside others: so many take a GPU less than a launch."""

_AT_ONCE = 2**26
"""Bytes that are copied at a time, at most."""


def _stacks(factor: Dense) -> Hashable | None:
    """What gradients that are read together have in common; None for one that is read by itself."""
    x = factor.values
    most = STACKED.get(x.device.type, 0)
    if not most or factor.norm_is_known or not factor.num_samples or is_traced():
        return None
    if type(x) is not torch.Tensor or not x.is_contiguous() or not 0 < x.nbytes <= most:
        return None
    return x.shape, x.dtype, x.device


def sq_norms(factors: Sequence[Factor]) -> list[SquaredNorm]:
    """Every factor's ``sq_norm()``, on a CPU the same bits; all have as many samples.

    In a graph the reference's are finished one by one: a compiler makes one loop of all, and bringing them together and
    taking them apart would be most of what that loop is given.
    """
    found = norms_or_unfinished(factors)
    if is_traced():
        found = [finished(norm) if isinstance(norm, Unfinished) else norm for norm in found]
    norms = {i: norm for i, norm in enumerate(found) if isinstance(norm, SquaredNorm)}
    unfinished: dict[torch.device, list[int]] = {}
    for i, part in enumerate(found):
        if not isinstance(part, SquaredNorm):
            unfinished.setdefault(part.device, []).append(i)
    for which in unfinished.values():
        together = finish([found[i] for i in which], factors[which[0]].num_samples)
        for i, value, upper in zip(which, together.value.unbind(), together.upper.unbind(), strict=True):
            norms[i] = SquaredNorm(value, upper)
    return [norms[i] for i in range(len(factors))]


def total_sq_norm(norms: Sequence[AnyNorm], n: int, places: Sequence[Sequence[int]]) -> SquaredNorm:
    """‖·‖² over all of them, (n,): each is of n samples, or of several layers' one after the other.

    Args:
        places: of each one's layers. They are added up in this order, in whatever company their norms were taken, which
            depends on n.
    """
    if not n or not norms:
        device = next((x.value.device if isinstance(x, SquaredNorm) else x.device for x in norms), None)
        return SquaredNorm(*(torch.zeros(n, dtype=torch.float64, device=device) for _ in range(2)))
    unfinished: dict[torch.device, list[int]] = {}
    known: list[SquaredNorm] = []
    order: list[int] = []
    for i, part in enumerate(norms):
        if isinstance(part, SquaredNorm):
            known.append(part)
            order += places[i]
        else:
            unfinished.setdefault(part.device, []).append(i)
    for which in unfinished.values():
        which.sort(key=lambda i: _kind(norms[i]))
        known.append(finish([norms[i] for i in which], n))
        order += [place for i in which for place in places[i]]
    device = known[-1].value.device
    value, upper = (
        rows_in_order(torch.cat([x.to(device).view(-1, n) for x in some]), order) for some in zip(*known, strict=True)
    )
    return added_up(value, upper)


def added_up(value: Tensor, upper: Tensor) -> SquaredNorm:
    """Over all of these, (F, n) each, in this order."""
    # That of sum(0) depends on n.
    return SquaredNorm(value.cumsum(0)[-1], upper.cumsum(0)[-1] * bounds.fp64_slop(len(upper)))


def _kind(norm: AnyNorm) -> tuple[str, tuple[int, int]]:
    """Those of one kind are worked out in fewest calls where they stand together."""
    own = norm.inner if type(norm) is UnfinishedStandardised else norm  # what a standardised weight's follows from
    kind = (own.kind or (0, int(own.error is not None))) if isinstance(own, Unfinished) else (0, 0)
    return type(norm).__name__ + type(own).__name__, kind
