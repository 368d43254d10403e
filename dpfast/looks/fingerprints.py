"""What tells whether rows are the same to the bit, without keeping them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpfast.taps import in_samples

_AT_ONCE = 2**15  # words of each row
_ODD = -7046029254386353131  # 2^64 over the golden ratio


def fingerprints(x: Tensor, dim: int) -> Tensor:
    """One number for the bits of each row along the dimension."""
    with torch._C._DisableTorchDispatch():  # modes that follow what a model does have nothing to see here
        count = x.shape[dim]
        rows = x.detach().movedim(dim, 0).reshape(count, x.numel() // max(count, 1))
        total, power = None, 1
        each = 8 // x.element_size()
        for start in range(0, rows.shape[1], _AT_ONCE * each):  # no copy of all: of logits it would be the largest
            part = rows[:, start : start + _AT_ONCE * each] + 0.0  # a zero's sign may come of zero times a row
            if odd := part.shape[1] % each:
                part = F.pad(part, (0, each - odd))
            words = part.reshape(-1).view(torch.int64).view(len(rows), part.shape[1] // each)
            # The upper half in the lower as well: of what changes the highest bit alone, a sign, products keep no more.
            mixed = (words >> 32).bitwise_xor_(words)
            found = mixed.mul_(_factors(x.device)[: words.shape[1]]).sum(1)  # zeros at a row's end: no change
            total = found if total is None else total.add_(found, alpha=power)
            power = (power * _ODD + 2**63) % 2**64 - 2**63
        return torch.zeros(count, dtype=torch.int64, device=x.device) if total is None else total


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, one for each word."""
    factors = torch.arange(1, _AT_ONCE + 1, device=device) * _ODD
    return (factors ^ (factors >> 29)) * _ODD | 1


class Prints(NamedTuple):
    """Of a tensor's rows along a dimension; in the samples' order, where the model has put them in another (sorted by
    length): ``order``, the rows' numbers in that order. ``whole``: of gradients the rows are kept themselves.
    ``packed``: the tensor is such a sequence's data; its rows are samples, in dimension 0."""

    dim: int
    order: Tensor | None
    whole: bool = False
    packed: PackedSequence | None = None

    def of(self, x: Tensor) -> Tensor:
        """Fingerprints."""
        found = fingerprints(x if self.packed is None else in_samples(self.packed, x), self.dim)
        return found if self.order is None else found[self.order]

    def of_gradient(self, x: Tensor) -> Tensor:
        """Fingerprints, or rows (R, K)."""
        if not self.whole:
            return self.of(x)
        x = x if self.packed is None else in_samples(self.packed, x)
        rows = x.detach().movedim(self.dim, 0).flatten(1) if x.dim() > 1 else x.detach().unsqueeze(1)
        return rows.clone() if self.order is None else rows[self.order]


def are_beyond_rounding(x: Tensor, y: Tensor, spread: float = 0.0) -> Tensor:
    """Which rows (R, K) differ by more than the same sums do that another kernel adds up in another order.

    Args:
        spread: by which part of themselves rows have differed where nothing else did.
    """
    eps = torch.finfo(x.dtype).eps if x.dtype in (torch.float32, torch.float64) else 0.0
    allowed = _ROUNDINGS * max(eps, spread)
    x, y = x.double(), y.double()
    same = ((x == y) | (x.isnan() & y.isnan())).all(1)
    return ~(same | ((x - y).norm(dim=1) <= allowed * x.norm(dim=1)))


def spread_of(x: Tensor, y: Tensor) -> float:
    """The largest part of a row's norm by which rows (R, K) differ."""
    x, y = x.double(), y.double()
    parts = (x - y).norm(dim=1) / x.norm(dim=1)
    return float(parts.nan_to_num(0.0).max()) if len(parts) else 0.0


_ROUNDINGS = 32
