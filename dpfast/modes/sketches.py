"""Linear sketches of what taps see: a few numbers a sample and tensor, by which two backward passes are compared."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfast.distributed import local
from dpfast.taps import Activations, Record

SKETCHED = 2048
"""The most entries of one sample's tensor that a sketch looks at, spread over all its dimensions."""

_WIDTH = 4
"""Numbers in a sketch of one sample's tensor."""

_SAME = 2.0**-12
"""How far the sketches of two runs on a CPU may differ, relatively: only the order of sums is left to a library."""

_ALIKE = 2.0**-5
"""The same for 16-bit tensors, and for GPUs, where sums may be atomic."""


class Sketches:
    """Of what the taps of one backward pass have seen, in the order of the pass."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[Tensor, float]]] = defaultdict(list)

    def take(self, record: Record, activations: Activations, backprops: tuple[Tensor, ...], *, whole: bool) -> None:
        """Of one use of a tap; samples are where the module has them.

        Args:
            whole: forwards have been run again, so look at every entry, and at activations too; without that these are
                the very tensors that the forward has saved.
        """
        dim = record.place if isinstance(record.place, int) else record.tap.batch_dim
        for x in tree_leaves((tuple(activations), activations.kwargs, backprops)) if whole else backprops:
            x = local(x)
            if isinstance(x, Tensor) and not x.is_complex() and x.dim() > dim:
                x = x if x.is_floating_point() else x.double()  # rows of a table, masks
                exact = x.device.type == "cpu" and x.dtype.itemsize >= 4
                self._seen[record.tap.layer].append((sketch(x, dim, whole), _SAME if exact else _ALIKE))

    def differing(self, first: Sketches, weights: Tensor) -> tuple[list[str], Tensor]:
        """Layers, and whether each has seen something else than in the first pass (·,), on the weights' device;
        dropped samples do not count. A layer that has surely seen the same may be left out."""
        layers: list[str] = []
        flags = [torch.zeros(0, dtype=torch.bool, device=weights.device)]
        alike: dict[tuple[Any, ...], list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        for layer in {**first._seen, **self._seen}:
            before, now = first._seen.get(layer, []), self._seen.get(layer, [])
            if [p.shape for p, _ in before] != [p.shape for p, _ in now]:
                layers.append(layer)
                flags.append(torch.ones(1, dtype=torch.bool, device=weights.device))
                continue
            for (p, tolerance), (q, _) in zip(before, now, strict=True):
                if p.device.type != "cpu" or not torch.equal(p, q):
                    alike[tolerance, p.shape, p.dtype, p.device].append((layer, p, q))
        for (tolerance, *_), uses in alike.items():
            layers += [use[0] for use in uses]
            firsts, seconds = torch.stack([use[1] for use in uses]), torch.stack([use[2] for use in uses])
            flags.append(self._differ(firsts, seconds, tolerance, weights).to(weights.device))
        return layers, torch.cat(flags)

    @staticmethod
    def _differ(before: Tensor, now: Tensor, tolerance: float, weights: Tensor) -> Tensor:
        """Of sketches (K, N, ·) taken together, (K,)."""
        far = (now - before).norm(dim=2) > tolerance * before.norm(dim=2)
        unlike = far | (torch.isfinite(now) != torch.isfinite(before)).any(2)
        if len(weights) == unlike.shape[1]:
            unlike = unlike & (weights.to(unlike.device) != 0)
        return unlike.any(1)


def sketch(x: Tensor, dim: int = 0, whole: bool = False) -> Tensor:
    """A few linear combinations of entries of each sample of x, (N, 4) fp32 or fp64; of a few entries, or of all.

    Args:
        dim: of the samples.
    """
    x = x.movedim(dim, 0) if dim else x
    dims = x.dim() - 1
    if whole and dims > 1:
        rows = x.flatten(1, -2).to(torch.promote_types(x.dtype, torch.float32))
        sums = rows @ _combinations(rows.shape[2], rows.dtype, x.device)
        return (sums * _combinations(rows.shape[1], rows.dtype, x.device)).sum(1)
    if not whole and x.shape[1:].numel() > SKETCHED:
        most = max(1, round(SKETCHED ** (1.0 / dims)))
        for d in range(1, x.dim()):
            step = math.ceil(x.shape[d] / most)
            if step > 1:
                x = x[(slice(None),) * d + (slice(None, None, step),)]
    if dims != 1:
        x = x.reshape(len(x), x.shape[1:].numel())
    if x.dtype.itemsize < 4:
        x = x.float()
    return torch.mm(x, _combinations(x.shape[1], x.dtype, x.device))


@lru_cache(maxsize=256)
def _combinations(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(length, :data:`_WIDTH`), no two rows alike."""
    places = torch.arange(1, length + 1, dtype=torch.float64).unsqueeze(1)
    combinations = torch.sin(places * torch.tensor([1.0, 2.0**0.5, 3.0**0.5, 5.0**0.5], dtype=torch.float64))
    return combinations.float().to(device, dtype)
