"""Batches of some of a model's samples, with others in the places of some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_samples(x: Any, dim: int | None, size: int) -> Any:
    """That many of a tensor's samples, in turns where it has fewer."""
    if dim is None or not isinstance(x, Tensor):
        return x
    return x.detach().index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])


def with_one_more(x: Any, dim: int | None, size: int, number: int) -> Any:
    """So many of a tensor's samples, and that one once more."""
    x = first_samples(x, dim, size)
    return x if dim is None else torch.cat([x, x.narrow(dim, number, 1)], dim)


def exchanged(x: Tensor, dim: int, numbers: tuple[int, ...]) -> Tensor:
    """A tensor with the next samples that stay in the places of these; where they agree, others made of them."""
    x, size = x.clone(), x.shape[dim]
    stay = [j % size for j in range(numbers[0] + 1, numbers[0] + size) if j % size not in numbers]
    for i, j in enumerate(numbers):
        own, other = x.select(dim, j), x.select(dim, stay[i % len(stay)]).clone()
        if torch.equal(own, other):
            other = own.flip(tuple(range(own.dim())))
        own.copy_(_another(own) if torch.equal(own, other) else other)
    return x


def _another(x: Tensor) -> Tensor:
    """Of one that is like all others: no whole number that is larger than what has been seen, and of a mask, where
    nobody is padded or everybody, one entry."""
    if x.is_floating_point():
        return x * 0.5 if bool(x.any()) else x + 0.5
    if x.dtype != torch.bool:
        return torch.where(x > 0, x - 1, x)
    last = torch.arange(x.numel(), device=x.device) == x.numel() - 1
    return x ^ last.view(x.shape)
