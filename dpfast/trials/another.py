"""What stands for a sample that is like all others: of its kind, and another in its entries and their sum."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dpfast.taps import Structure

_FLAGS = 4  # of a sample; a mask of tokens or pixels has more


def another(x: Any, more: bool) -> Any:
    """Of an entry: a number, a tensor or an array, and what holds such. Texts are as they are: in a look-up there may
    be no others."""
    structure = Structure(x)
    return structure.unflatten([_another_leaf(y, more) for y in structure.leaves])


def _another_leaf(x: Any, more: bool) -> Any:
    if isinstance(x, Tensor):
        return another_of(x.detach(), more) if x.layout is torch.strided else x
    if type(x).__module__ == "numpy":
        return _another_of_numpy(x, more)
    if isinstance(x, bool):
        return not x
    if isinstance(x, Integral):
        return type(x)(max(int(x) - 1, 0))  # type: ignore[call-arg]  # of a kind of int
    return 0.5 * x if isinstance(x, Real) else x


def _another_of_numpy(x: Any, more: bool) -> Any:
    import numpy as np

    if x.dtype.kind not in "biufc":  # texts, objects
        return x
    other = another_of(torch.from_numpy(np.array(x)), more).numpy()
    return other if x.ndim else other[()]


def another_of(x: Tensor, more: bool) -> Tensor:
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
