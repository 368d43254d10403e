"""Noise of a shard: drawn for places of the whole parameter, so it is the same however many ranks share it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpfast.distributed.wrappers import local
from dpfast.errors import UnsupportedModuleError

_BLOCK = 2**16
_BLOCK_OF_A_GPU = 2**22
"""Numbers of a whole parameter that one generator gives; a rank draws each block that it has a part of."""


def add_noise(grad: Any, std: float, generator: Callable[[int], torch.Generator]) -> None:
    """Adds this rank's part of Gaussian noise of standard deviation ``std`` to its part of a DTensor.

    Args:
        generator: of a block, by number; blocks are counted along the whole parameter's entries, with the dimension in
            front in which it is sharded.

    Raises:
        UnsupportedModuleError: it is sharded in two dimensions.
    """
    own, shape = local(grad), grad.shape
    dim, first = _where(grad)
    target = own.movedim(dim, 0)
    start = first * (shape.numel() // max(1, shape[dim]))
    flat = target.view(-1) if target.is_contiguous() else own.new_zeros(own.numel())
    size = _BLOCK if own.device.type == "cpu" else _BLOCK_OF_A_GPU
    dtype = torch.promote_types(own.dtype, torch.float32)
    for block in range(start // size, -(-(start + flat.numel()) // size)):
        begin, end = block * size, min((block + 1) * size, shape.numel())
        noise = torch.empty(end - begin, dtype=dtype, device=own.device).normal_(0.0, std, generator=generator(block))
        low, high = max(begin, start), min(end, start + flat.numel())
        flat[low - start : high - start] += noise[low - begin : high - begin].to(own.dtype)
    if not target.is_contiguous():
        target += flat.view(target.shape)


def _where(grad: Any) -> tuple[int, int]:
    """The dimension in which it is sharded, and the first of the whole one's rows there that this rank has."""
    sharded = [(i, place.dim) for i, place in enumerate(grad.placements) if place.is_shard()]
    if len(sharded) != 1:
        raise UnsupportedModuleError(
            f"{tuple(grad.shape)} is placed as {grad.placements}: noise is drawn for one shard"
        )
    axis, dim = sharded[0]
    each = -(-grad.shape[dim] // grad.device_mesh.size(axis))
    return dim, min(each * grad.device_mesh.get_coordinate()[axis], grad.shape[dim])
