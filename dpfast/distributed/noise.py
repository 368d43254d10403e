"""Noise of a shard: drawn for places of the whole parameter, so it is the same however many ranks share it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpfast.distributed.placements import extents, local

_BLOCK = 2**16
_BLOCK_OF_A_GPU = 2**22
"""Numbers of a whole parameter that one generator gives; a rank draws each block that it has a part of."""


def add_noise(grad: Any, std: float, generator: Callable[[int], torch.Generator]) -> None:
    """Adds this rank's part of Gaussian noise of standard deviation ``std`` to its part of a DTensor.

    Args:
        generator: of a block, by number; blocks are counted along the whole parameter's entries, with the dimension in
            front in which it is sharded, or the first of two: then the whole rows of this rank's part are drawn for.
    """
    own, shape = local(grad), grad.shape
    dim = next(place.dim for place in grad.placements if not place.is_replicate())
    found = extents(grad)
    first, rows = found.pop(dim)
    target, width = own.movedim(dim, 0), shape.numel() // max(1, shape[dim])
    start = first * width
    in_place = target.is_contiguous() and target.numel() == rows * width
    dtype = torch.promote_types(own.dtype, torch.float32)  # and only the noisy sum is rounded
    flat = target.view(-1) if in_place else own.new_zeros(rows * width, dtype=dtype)
    size = _BLOCK if own.device.type == "cpu" else _BLOCK_OF_A_GPU
    for block in range(start // size, -(-(start + flat.numel()) // size)):
        begin, end = block * size, min((block + 1) * size, shape.numel())
        noise = torch.empty(end - begin, dtype=dtype, device=own.device).normal_(0.0, std, generator=generator(block))
        low, high = max(begin, start), min(end, start + flat.numel())
        flat[low - start : high - start].add_(noise[low - begin : high - begin])
    if not in_place:
        picked = flat.view(rows, *shape[:dim], *shape[dim + 1 :])
        for other, (begin, size) in enumerate(found, 1):
            picked = picked.narrow(other, begin, size)
        target += picked
