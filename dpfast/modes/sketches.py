"""Linear sketches of what taps see: a few numbers a sample and tensor, by which two backward passes are compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfast.distributed import local
from dpfast.errors import StateError
from dpfast.taps import Activations, Record

_RUNS, _RUN = 16, 128
"""Of a large tensor so many runs are looked at, spread over each sample's, of so many entries beside each other."""

SKETCHED = _RUNS * _RUN
"""The most entries of one sample's tensor that a sketch looks at."""

HELD, HELD_IN_ALL = 2**16, 2**21
"""Bytes up to which a CPU's tensor is held itself, because reading it again costs less than the calls that a sketch
takes, and how many one pass holds so at most."""

_WIDTH = 4
"""Numbers in a sketch of one sample's tensor, or of each of its runs."""

_SAME = 2.0**-12
"""How far the sketches of two runs on a CPU may differ, relatively: only the order of sums is left to a library."""

_ALIKE = 2.0**-5
"""The same for 16-bit tensors, and for GPUs, where sums may be atomic."""


class Sketches:
    """Of what the taps of one backward pass have seen, in the order of the pass."""

    def __init__(self) -> None:
        self._held: list[tuple[Record, Tensor, int]] = []  # with the tensors' versions
        self._bytes = 0
        self._seen: dict[Any, list[tuple[Tensor, bool]]] = defaultdict(list)  # by tap; whether only sums' order is free

    def take(self, record: Record, activations: Activations, backprops: tuple[Tensor, ...], *, whole: bool) -> None:
        """Of one use of a tap; samples are where the module has them.

        Args:
            whole: forwards have been run again, so look at every entry, and at activations too; without that these are
                the very tensors that the forward has saved.
        """
        if not whole and len(backprops) == 1:
            x = backprops[0]
            if type(x) is Tensor and x.is_cpu and self._bytes < HELD_IN_ALL:
                size = x.untyped_storage().nbytes()
                if size <= HELD:
                    self._bytes += size
                    self._held.append((record, x, x._version))
                    return
        self._sketch(
            record, tree_leaves((tuple(activations), activations.kwargs, backprops)) if whole else backprops, whole
        )

    def _sketch(self, record: Record, tensors: Iterable[Any], whole: bool = False) -> None:
        dim = record.place if isinstance(record.place, int) else record.tap.batch_dim
        for x in map(local, tensors):
            if isinstance(x, Tensor) and not x.is_complex() and x.dim() > dim:
                x = x if x.is_floating_point() else x.double()  # rows of a table, masks
                self._seen[record.tap].append((sketch(x, dim, whole), x.is_cpu and x.itemsize >= 4))

    def differing(self, first: Sketches, weights: Tensor) -> tuple[list[str], Tensor]:
        """Layers, and whether each has seen something else than in the first pass (·,), on the weights' device;
        dropped samples do not count. A layer that has surely seen the same may be left out.

        Raises:
            StateError: what a layer has seen was written to since.
        """
        for record, x, version in (*first._held, *self._held):
            if x._version != version:
                raise StateError(
                    f"{record.tap.layer}: the gradient at its output was written to after a backward pass had seen it; "
                    "write to a copy"
                )
        one, two = first._held, self._held
        if [held[0] for held in one] != [held[0] for held in two] or not all(map(_same, one, two)):
            for sketches in (first, self):
                for record, x, _ in sketches._held:
                    sketches._sketch(record, (x,))
        layers: list[str] = []
        flags = [torch.zeros(0, dtype=torch.bool, device=weights.device)]
        alike: dict[tuple[Any, ...], list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        for tap in {**first._seen, **self._seen}:
            before, now = first._seen.get(tap, []), self._seen.get(tap, [])
            if [p.shape for p, _ in before] != [p.shape for p, _ in now]:
                layers.append(tap.layer)
                flags.append(torch.ones(1, dtype=torch.bool, device=weights.device))
                continue
            for (p, exact), (q, _) in zip(before, now, strict=True):
                if not p.is_cpu or not torch.equal(p, q):
                    alike[exact, p.shape, p.dtype, p.device].append((tap.layer, p, q))
        for (exact, *_), uses in alike.items():
            layers += [use[0] for use in uses]
            firsts, seconds = torch.stack([use[1] for use in uses]), torch.stack([use[2] for use in uses])
            flags.append(self._differ(firsts, seconds, _SAME if exact else _ALIKE, weights).to(weights.device))
        return layers, torch.cat(flags)

    @staticmethod
    def _differ(before: Tensor, now: Tensor, tolerance: float, weights: Tensor) -> Tensor:
        """Of sketches (K, N, ·) taken together, (K,)."""
        far = (now - before).norm(dim=2) > tolerance * before.norm(dim=2)
        unlike = far | (torch.isfinite(now) != torch.isfinite(before)).any(2)
        if len(weights) == unlike.shape[1]:
            unlike = unlike & (weights.to(unlike.device) != 0)
        return unlike.any(1)


def _same(before: tuple[Record, Tensor, int], now: tuple[Record, Tensor, int]) -> bool:
    p, q = before[1], now[1]
    return p.dtype is q.dtype and torch.equal(p, q)


def sketch(x: Tensor, dim: int = 0, whole: bool = False) -> Tensor:
    """A few linear combinations of entries of each sample of x, (N, ·) fp32 or fp64; of a few entries, or of all.

    Args:
        dim: of the samples.
    """
    x = x.movedim(dim, 0) if dim else x
    size, numel, dims = len(x), x.shape[1:].numel(), x.dim() - 1
    if whole and dims > 1:
        rows = x.flatten(1, -2).to(torch.promote_types(x.dtype, torch.float32))
        sums = rows @ _combinations(rows.shape[2], rows.dtype, x.device).mT
        return (sums * _combinations(rows.shape[1], rows.dtype, x.device).mT).sum(1)
    if not whole and numel > SKETCHED and x.is_contiguous():  # two calls: between large products they are all cold
        x = x.as_strided((size, _RUNS, _RUN), (numel, (numel - _RUN) // (_RUNS - 1), 1))
        x = x.float() if x.itemsize < 4 else x
        return torch.bmm(_combinations_each(size, _RUN, x.dtype, x.device), x.mT).flatten(1)
    if not whole and numel > SKETCHED:
        most = max(1, round(SKETCHED ** (1.0 / dims)))
        for d in range(1, x.dim()):
            step = math.ceil(x.shape[d] / most)
            if step > 1:
                x = x[(slice(None),) * d + (slice(None, None, step),)]
    if dims != 1:
        x = x.reshape(size, x.shape[1:].numel())
    if x.itemsize < 4:
        x = x.float()
    return torch.mm(_combinations(x.shape[1], x.dtype, x.device), x.mT).mT


@lru_cache(maxsize=256)
def _combinations(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(:data:`_WIDTH`, length), no two columns alike. Products with a few rows take a third of those with columns."""
    places = torch.arange(1, length + 1, dtype=torch.float64)
    factors = torch.tensor([[1.0], [2.0**0.5], [3.0**0.5], [5.0**0.5]], dtype=torch.float64)
    return torch.sin(places * factors).float().to(device, dtype)


@lru_cache(maxsize=256)
def _combinations_each(size: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for each sample."""
    return _combinations(length, dtype, device).expand(size, -1, -1)
