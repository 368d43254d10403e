"""The norms of many factors, what is left to do with N numbers done for all at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, Unfinished, finish_norms
from dpfast.factors.dense import Dense, Factor, InBlocks
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct


def norm_or_unfinished(factor: Factor) -> SquaredNorm | Unfinished:
    """Its norm, or what that follows from."""
    if isinstance(factor, (Dense, InBlocks, Lookup, OuterProduct)) and factor.num_samples:
        return factor.unfinished() or factor.sq_norm()
    return factor.sq_norm()


def sq_norms(factors: Sequence[Factor]) -> list[SquaredNorm]:
    """Every factor's ``sq_norm()``, the same bits; all have as many samples."""
    found = [norm_or_unfinished(factor) for factor in factors]
    norms = {i: norm for i, norm in enumerate(found) if isinstance(norm, SquaredNorm)}
    unfinished: dict[torch.device, list[tuple[int, Unfinished]]] = {}
    for i, part in enumerate(found):
        if isinstance(part, Unfinished):
            unfinished.setdefault(part.norm.device, []).append((i, part))
    for parts in unfinished.values():
        together = finish_norms([part for _, part in parts], len(parts[0][1].norm))
        for (i, _), value, upper in zip(parts, together.value.unbind(), together.upper.unbind(), strict=True):
            norms[i] = SquaredNorm(value, upper)
    return [norms[i] for i in range(len(factors))]


def total_sq_norm(norms: Sequence[SquaredNorm | Unfinished], n: int, places: Sequence[Sequence[int]]) -> SquaredNorm:
    """‖·‖² over all of them, (n,): each is of n samples, or of several layers' one after the other.

    Args:
        places: of each one's layers. They are added up in this order, in whatever company their norms were taken, which
            depends on n.
    """
    unfinished: dict[torch.device, list[int]] = {}
    known: list[SquaredNorm] = []
    order: list[int] = []
    for i, part in enumerate(norms):
        if isinstance(part, Unfinished):
            unfinished.setdefault(part.norm.device, []).append(i)
        else:
            known.append(part)
            order += places[i]
    for which in unfinished.values():
        which.sort(key=lambda i: norms[i].kind or (0, 0))  # type: ignore[union-attr]  # unfinished
        known.append(finish_norms([part for i in which if isinstance(part := norms[i], Unfinished)], n))
        order += [place for i in which for place in places[i]]
    if not n or not known:
        return SquaredNorm(*(torch.zeros(n, dtype=torch.float64),) * 2)
    device = known[-1].value.device
    in_order = sorted(range(len(order)), key=order.__getitem__)
    value, upper = (
        _rows_in_order([x.to(device).view(-1, n) for x in some], in_order) for some in zip(*known, strict=True)
    )
    value, upper = value.cumsum(0)[-1], upper.cumsum(0)[-1] * (1.0 + (len(upper) + 4) * 2.0**-53)
    return SquaredNorm(value, upper)  # the order of sum(0) depends on n


def _rows_in_order(parts: list[Tensor], order: list[int]) -> Tensor:
    if order == list(range(len(order))):
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return rows.index_select(0, _index(tuple(order), rows.device))


@lru_cache(maxsize=256)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)  # a GPU would be waited for each time
