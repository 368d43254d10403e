"""Batches of some of a model's samples, with others in the places of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.trials.another import another_of
from dpfast.trials.entries import Entries


def taken(x: Any, dim: int | None, numbers: Sequence[int]) -> Any:
    """The samples of these numbers, in turns where there are fewer."""
    if dim is not None and isinstance(x, Entries):
        return x.taken(i % len(x) for i in numbers)
    if dim is None or not isinstance(x, Tensor):
        return x
    return x.detach().index_select(dim, torch.tensor(numbers, device=x.device) % x.shape[dim])


def first_samples(x: Any, dim: int | None, size: int) -> Any:
    """That many of the samples."""
    return taken(x, dim, range(size))


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
        own.copy_(another_of(own, j % 2 == 1) if torch.equal(own, other) else other)
    return x
