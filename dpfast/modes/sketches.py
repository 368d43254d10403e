"""What taps see, in a few numbers a sample and tensor, by which two backward passes are compared."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfast.distributed import local
from dpfast.errors import StateError
from dpfast.taps import Activations, Record

_RUN, _RUNS, _ALL_RUNS = 16, 16, 256
"""Entries beside each other, a line of a cache; how many such runs are looked at of each sample of a large tensor at
most, spread over it; and of all samples, where that leaves the least."""

_LEAST_RUNS, _LEAST_RUNS_OF_ROWS = 4, 2
"""The least of each sample, and of one that is a single row: where it has positions, some may be padding."""

_HELD = 2**23
"""Bytes of gradients that a pass holds as they are, before it keeps entries of them in their place. Between two large
products the calls that copy a few entries take 0.15 ms, whatever they read: nothing is in the caches. The second of
several tensors takes a tenth of that."""

_SMALL = 2**16
"""Bytes of a held tensor that is compared whole."""

_WIDTH = 4
"""Numbers in a sketch of one sample's tensor."""

_SAME = 2.0**-12
"""How far two runs on a CPU may differ, relatively: only the order of sums is left to a library."""

_ALIKE = 2.0**-5
"""The same for 16-bit tensors, and for GPUs, where sums may be atomic."""


@dataclass(slots=True, eq=False)
class _Look:
    """At one tensor.

    Attributes:
        x: the tensor, entries of it, or a sketch.
        version: of the tensor when it was seen; None where ``x`` is our own.
        exact: whether only the order of sums is free, as far as ``x`` does not tell.
    """

    record: Record
    x: Tensor
    version: int | None
    exact: bool = True

    def check(self) -> None:
        """Raises StateError where the tensor was written to since."""
        if self.version is not None and self.x._version != self.version:
            raise StateError(
                f"{self.record.tap.layer}: the gradient at its output was written to after a backward pass had seen "
                "it; write to a copy"
            )


class Sketches:
    """Of what the taps of one backward pass have seen, in the order of the pass."""

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._held: list[_Look] = []
        self._bytes = 0

    def take(self, record: Record, activations: Activations, backprops: tuple[Tensor, ...], *, whole: bool) -> None:
        """Of one use of a tap; samples are where the module has them.

        Args:
            whole: forwards have been run again, so look at every entry, and at activations too; without that these are
                the very tensors that the forward has saved.
        """
        dim = _dim(record)
        if whole:
            inputs = () if record.unread else (tuple(activations), activations.kwargs)
            for x in map(local, tree_leaves((inputs, backprops))):
                if _has_samples(x, dim):
                    exact = x.is_cpu and x.itemsize >= 4
                    x = x if x.is_floating_point() else x.double()  # rows of a table, masks
                    self._looks.append(_Look(record, sketch(x, dim), None, exact))
            return
        for x in map(local, backprops):
            if _has_samples(x, dim):
                look = _Look(record, x, x._version)
                self._looks.append(look)
                self._held.append(look)
                self._bytes += x.untyped_storage().nbytes()  # which lives as long as a view of it
        if self._bytes > _HELD:
            self._let_go()

    def _let_go(self) -> None:
        """Of what is held; entries stay.

        Raises:
            StateError: it was written to since.
        """
        for look in self._held:
            look.check()
            look.x = entries(look.x, _dim(look.record)).clone(memory_format=torch.contiguous_format)
            look.version = None
        self._held, self._bytes = [], 0

    def differing(self, first: Sketches, weights: Tensor) -> tuple[list[str], Tensor]:
        """Layers, and whether each has seen something else than in the first pass (·,), on the weights' device;
        dropped samples do not count. A layer that has surely seen the same may be left out.

        Raises:
            StateError: what a layer has seen was written to since.
        """
        for look in (*first._held, *self._held):
            look.check()
        layers: list[str] = []
        flags = [torch.zeros(0, dtype=torch.bool, device=weights.device)]
        if len(first._looks) == len(self._looks) and all(map(_held_and_same, first._looks, self._looks)):
            return layers, flags[0]
        first._let_go()
        self._let_go()
        if len(first._looks) == len(self._looks) and all(map(_same, first._looks, self._looks)):
            return layers, flags[0]
        alike: dict[tuple[Any, ...], list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        befores, nows = first._by_tap(), self._by_tap()
        for tap in {**befores, **nows}:
            before, now = befores.get(tap, []), nows.get(tap, [])
            if [look.x.shape for look in before] != [look.x.shape for look in now]:
                layers.append(tap.layer)
                flags.append(torch.ones(1, dtype=torch.bool, device=weights.device))
                continue
            for p, q in zip(before, now, strict=True):
                if not p.x.is_cpu or p.x.dtype is not q.x.dtype or not torch.equal(p.x, q.x):
                    alike[p.exact and p.x.is_cpu and p.x.itemsize >= 4, p.x.shape, p.x.dtype, p.x.device].append(
                        (tap.layer, _rows(p.x), _rows(q.x))
                    )
        for (exact, *_), uses in alike.items():
            layers += [use[0] for use in uses]
            firsts, seconds = torch.stack([use[1] for use in uses]), torch.stack([use[2] for use in uses])
            flags.append(_differ(firsts, seconds, _SAME if exact else _ALIKE, weights).to(weights.device))
        return layers, torch.cat(flags)

    def _by_tap(self) -> dict[Any, list[_Look]]:
        looks: dict[Any, list[_Look]] = defaultdict(list)
        for look in self._looks:
            looks[look.record.tap].append(look)
        return looks


def _dim(record: Record) -> int:
    """Of the samples, in what a tap sees."""
    return record.place if isinstance(record.place, int) else record.tap.batch_dim


def _has_samples(x: Any, dim: int) -> bool:
    return isinstance(x, Tensor) and not x.is_complex() and x.dim() > dim


def _rows(x: Tensor) -> Tensor:
    """Of numbers by sample, (N, ·)."""
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def _same(p: _Look, q: _Look) -> bool:
    """Bit by bit, of what is kept on the CPU."""
    return p.record is q.record and p.x.is_cpu and p.x.dtype is q.x.dtype and torch.equal(p.x, q.x)


def _held_and_same(p: _Look, q: _Look) -> bool:
    """Bit by bit, of what both passes hold on the CPU."""
    if p.version is None or q.version is None or p.record is not q.record:
        return False
    before, now = p.x, q.x
    if not before.is_cpu or before.dtype is not now.dtype or before.shape != now.shape:
        return False
    if before.nbytes > _SMALL:
        before, now = entries(before, _dim(p.record)), entries(now, _dim(p.record))
    return torch.equal(before, now)


def _differ(before: Tensor, now: Tensor, tolerance: float, weights: Tensor) -> Tensor:
    """Of numbers (K, N, ·) taken together, (K,). In fp64: where a norm overflows nothing is farther than it."""
    before, now = before.double(), now.double()
    far = (now - before).norm(dim=2) > tolerance * before.norm(dim=2)
    unlike = far | (torch.isfinite(now) != torch.isfinite(before)).any(2)
    if len(weights) == unlike.shape[1]:
        unlike = unlike & (weights.to(unlike.device) != 0)
    return unlike.any(1)


def entries(x: Tensor, dim: int = 0) -> Tensor:
    """A view of some entries of each sample of x, (N, ·, ...); of all where they are few.

    Args:
        dim: of the samples.
    """
    x = x.movedim(dim, 0) if dim else x
    numel, dims = x.shape[1:].numel(), x.dim() - 1
    least = _LEAST_RUNS if dims > 1 else _LEAST_RUNS_OF_ROWS
    runs = max(least, min(_RUNS, _ALL_RUNS // max(1, len(x))))
    if numel <= runs * _RUN:
        return x
    if x.is_contiguous():
        return x.as_strided((len(x), runs, _RUN), (numel, (numel - _RUN) // (runs - 1), 1))
    most = max(1, round((runs * _RUN) ** (1.0 / dims)))
    for d in range(1, x.dim()):
        step = math.ceil(x.shape[d] / most)
        if step > 1:
            x = x[(slice(None),) * d + (slice(None, None, step),)]
    return x


def sketch(x: Tensor, dim: int = 0) -> Tensor:
    """A few linear combinations of all entries of each sample of x, (N, ·) fp32 or fp64.

    Args:
        dim: of the samples.
    """
    x = (x.movedim(dim, 0) if dim else x).to(torch.promote_types(x.dtype, torch.float32))
    if x.dim() > 2:
        rows = x.flatten(1, -2)
        sums = rows @ _combinations(rows.shape[2], rows.dtype, x.device).mT
        return (sums * _combinations(rows.shape[1], rows.dtype, x.device).mT).sum(1)
    x = x.reshape(len(x), x.shape[1:].numel())
    return torch.mm(_combinations(x.shape[1], x.dtype, x.device), x.mT).mT


@lru_cache(maxsize=256)
def _combinations(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(:data:`_WIDTH`, length), no two columns alike. Products with a few rows take a third of those with columns."""
    places = torch.arange(1, length + 1, dtype=torch.float64)
    factors = torch.tensor([[1.0], [2.0**0.5], [3.0**0.5], [5.0**0.5]], dtype=torch.float64)
    return torch.sin(places * factors).float().to(device, dtype)
