"""Norms of the rows of what layers saw, for error bounds: within one step each is taken once.

The input of q, k and v, or of a gate and its projection, is one tensor, and a layer's weight and bias have one gradient
of its output. What has been taken of a tensor is found by the memory that it stands on, not by its values: the same
storage (a weak reference, so no other one can have its address, and none lives longer for it), the same place, shape,
strides and dtype in it, the same version (every write by torch counts), on the same stream. What is kept, one number a
row, lives as long as the :class:`RowNorms`, which is as long as its step; outside of a step nothing is kept.

Only error bounds may rest on it, never a norm itself: memory that was overwritten behind torch's back would be missed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpfast.arithmetic.streams import stream_here
from dpfast.arithmetic.tracing import is_traced

_FROM = {"cpu": 2**14}
"""Entries from which norms take a CPU several times as long as looking for them (1.4 µs); elsewhere any launch does."""


class RowNorms:
    """What one step has taken; ``with`` it, :func:`taken_once` looks there, in this thread. It may be entered again."""

    def __init__(self) -> None:
        self._taken: dict[Hashable, tuple[Tensor, StorageWeakRef]] = {}
        self.ways: dict[Hashable, bool] = {}
        """What does not change within a step, by what it depends on: asked of the environment, it takes as long as an
        operation."""
        self.products: dict[Hashable, tuple[Tensor, Tensor]] = {}
        """Of coefficients, which are held, so that their ids are no others', with numbers."""

    def __enter__(self) -> None:
        _here.entered.append(self)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _here.entered.pop()

    def once(self, take: _Take, x: Tensor, by: _Take) -> Tensor:
        """``by(x)``, or what it gave before."""
        key, storage = _key(take, x)
        found = self._taken.get(key)
        if found is None:
            found = self._taken[key] = by(x), StorageWeakRef(storage)
        return found[0]

    def each(self, take: _Take, tensors: Sequence[Tensor], together: _TakeEach) -> list[Tensor]:
        """:meth:`once` of each; ``together`` gives the same, to the bit, of several."""
        keys, missing = [], {}
        for x in tensors:
            key, storage = _key(take, x)
            keys.append(key)
            if key not in self._taken:
                missing[key] = x, storage
        if missing:
            found = together([(x,) for x, _ in missing.values()])
            for (key, (_, storage)), norms in zip(missing.items(), found, strict=True):
                self._taken[key] = norms, StorageWeakRef(storage)
        return [self._taken[key][0] for key in keys]


_Take = Callable[[Tensor], Tensor]
_TakeEach = Callable[[Sequence[tuple[Tensor]]], Sequence[Tensor]]


def _key(take: _Take, x: Tensor) -> tuple[Hashable, Any]:
    """And the storage: as long as a weak reference to it is there, no other one is known by its number."""
    storage = x.untyped_storage()
    memory = storage._cdata, x.data_ptr(), x._version
    return (take, memory, x.shape, x.stride(), x.dtype, stream_here(x.device)), storage


def taken_once(take: _Take, x: Tensor, by: _Take | None = None) -> Tensor:
    """``take(x)``; within a step what it gave before of the same tensor. Nobody may write to it.

    Args:
        by: what gives the same, to the bit.
    """
    by = by or take
    return by(x) if _is_never_looked_for(x) else _here.entered[-1].once(take, x, by)


def taken_each(take: _Take, tensors: Sequence[Tensor], together: _TakeEach) -> list[Tensor]:
    """:func:`taken_once` of tensors that are alike.

    Args:
        together: what gives the same of several, ``(x,)`` each, to the bit.
    """
    if _is_never_looked_for(tensors[0]):
        return [*together([(x,) for x in tensors])]
    return _here.entered[-1].each(take, tensors, together)


def _is_never_looked_for(x: Tensor) -> bool:
    few = x.numel() < _FROM.get(x.device.type, 0)
    return few or not _here.entered or type(x) is not Tensor or x.is_inference()


def lowered(coefficients: Tensor, by: float) -> Tensor:
    """Their product with a number; within a step once for all sums that have these coefficients, because on a GPU each
    would be a launch. Nobody may write to it."""
    if not _here.entered or is_traced() or coefficients.is_inference():
        return coefficients * by
    products, key = _here.entered[-1].products, (id(coefficients), coefficients._version, by)
    if key not in products:
        products[key] = coefficients, coefficients * by
    return products[key][1]


def ways_here() -> dict[Hashable, bool] | None:
    """Of the step that is taken here; None outside of one."""
    return _here.entered[-1].ways if _here.entered else None


class _Here(threading.local):
    def __init__(self) -> None:
        self.entered: list[RowNorms] = []


_here = _Here()
