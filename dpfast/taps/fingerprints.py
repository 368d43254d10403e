"""What tells whether rows are the same to the bit, without keeping them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 2**22
_ODD = -7046029254386353131  # 2^64 over the golden ratio


def fingerprints(x: Tensor, dim: int) -> Tensor:
    """One number for the bits of each row along the dimension."""
    rows = x.detach().movedim(dim, 0).reshape(x.shape[dim], -1)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    step = max(1, _AT_ONCE // max(1, len(rows)))
    found = []
    for start in range(0, rows.shape[1], step):
        part = rows[:, start : start + step] + 0.0  # a zero has a sign, which may come of zero times another row
        found.append((part.contiguous().view(bits) * _factors(start, part.shape[1], x.device)).sum(1))
    return sum(found[1:], found[0]) if found else torch.zeros(len(rows), dtype=torch.int64, device=x.device)


@functools.lru_cache(maxsize=8)
def _factors(start: int, number: int, device: torch.device) -> Tensor:
    """Odd numbers, one for each place in a row."""
    factors = torch.arange(start + 1, start + number + 1, device=device) * _ODD
    return (factors ^ (factors >> 29)) * _ODD | 1


class Prints(NamedTuple):
    """Of a tensor's rows along a dimension; in the samples' order, where the model has put them in another (sorted by
    length): ``order``, the rows' numbers in that order."""

    dim: int
    order: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        """Fingerprints."""
        found = fingerprints(x, self.dim)
        return found if self.order is None else found[self.order]
