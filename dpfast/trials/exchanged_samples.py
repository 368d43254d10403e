"""Batches of some of a model's samples, with others in the places of some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfast.trials.entries import Entries

_FLAGS = 4  # of a sample; a mask of tokens or pixels has more


def first_samples(x: Any, dim: int | None, size: int) -> Any:
    """That many of the samples, in turns where there are fewer."""
    if dim is not None and isinstance(x, Entries):
        return x.taken(i % len(x) for i in range(size))
    if dim is None or not isinstance(x, Tensor):
        return x
    return x.detach().index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])


def with_one_more(x: Any, dim: int | None, size: int, number: int) -> Any:
    """So many of the samples, and that one once more."""
    x = first_samples(x, dim, size)
    if dim is not None and isinstance(x, Entries):
        return x.taken((*range(size), number))
    return x if dim is None else torch.cat([x, x.narrow(dim, number, 1)], dim)


def exchanged(x: Any, dim: int, numbers: tuple[int, ...]) -> Any:
    """With the next samples that stay in the places of these; where they agree, others made of them."""
    size = len(x) if isinstance(x, Entries) else x.shape[dim]
    stay = [j % size for j in range(numbers[0] + 1, numbers[0] + size) if j % size not in numbers]
    places = {j: stay[i % len(stay)] for i, j in enumerate(numbers)}
    if isinstance(x, Entries):
        return x.exchanged(places)
    x = x.clone()
    for j, k in places.items():
        own, other = x.select(dim, j), x.select(dim, k).clone()
        own.copy_(_another(own, j % 2 == 1) if torch.equal(own, other) else other)
    return x


def _another(x: Tensor, more: bool) -> Tensor:
    """Of one that is like others: in another order, and with another sum. No whole number is larger than what has been
    seen.

    Args:
        more: of a mask, more entries are set, if there is room; else fewer.
    """
    if x.dtype == torch.bool:
        return _another_mask(x, more)
    if bool(((x == 0) | (x == 1)).all()) and bool(x.any()):
        return _another_mask(x == 1, more).to(x.dtype)
    other = x.flip(tuple(range(x.dim())))
    if x.is_floating_point() or x.is_complex():
        return other * 0.5 if bool(x.any()) else other + 0.5
    return torch.where(other > 0, other - 1, other)


def _another_mask(x: Tensor, more: bool) -> Tensor:
    """With one entry at least that is set, and one that is not. Flags are turned."""
    entries = x.flatten()
    ones = int(entries.sum())
    zeros = entries.numel() - ones
    if entries.numel() <= _FLAGS and 0 in (ones, zeros):
        return ~x
    if ones <= 1 or (more and zeros > 1):
        found = entries | ((~entries).cumsum(0) > zeros // 2)
    else:
        found = entries & (entries.cumsum(0) > ones // 2)
    return found.view(x.shape)
