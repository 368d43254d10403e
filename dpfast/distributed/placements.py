"""Where a rank's part of a DTensor is.

FSDP2 shards what tensor parallel has left to a rank, so its axes of the mesh come first and count last:
(_StridedShard(0), Shard(0)) are rows that tensor parallel has parted, and FSDP2 each part again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError


def is_shard(p: Any) -> bool:
    """Whether it is a DTensor."""
    return any_shard((p,))


def any_shard(some: Iterable[Any]) -> bool:
    """Whether one of them is."""
    tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if tensor is not None:
        for x in some:
            if type(x) not in _PLAIN and isinstance(x, tensor):
                return True
    return False


_PLAIN = (Tensor, nn.Parameter, type(None))


def local(x: Any) -> Any:
    """This rank's part of a DTensor; any other tensor itself."""
    return x if type(x) is Tensor or not is_shard(x) else x.to_local()


def placed(p: Any, part: Tensor) -> Tensor:
    """This rank's part of a gradient as the parameter is: a DTensor where that is one."""
    if type(p) in _PLAIN or not is_shard(p):
        return part
    of_whole: Tensor = type(p.data).from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return of_whole


def is_parted(p: Any, axes: slice = slice(None)) -> bool:
    """Whether this rank has a part of it alone, on these axes of its mesh."""
    return is_shard(p) and not all(place.is_replicate() for place in p.placements[axes])


def sharding_axes(p: Any) -> int:
    """How many axes of its mesh are FSDP2's, which has taken it: one, with replicas of it (HSDP) two."""
    return 2 if len(p.placements) > 1 and p.placements[0].is_replicate() else 1


def ranks_sharing(p: Any) -> int:
    """Over how many ranks FSDP2 sums its gradient."""
    return math.prod(map(p.device_mesh.size, range(sharding_axes(p))))


def extents(p: Any, axes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The first entry, and how many, that this rank has of each dimension of a DTensor; ``axes`` of its mesh, all if
    None. Parts are as long as each other, but for the last ones, which may be shorter or empty.

    Raises:
        UnsupportedModuleError: a dimension is parted twice, and not by FSDP2 last.
    """
    found = [(0, size) for size in p.shape]
    parting = [place for axis, place in enumerate(p.placements) if p.device_mesh.size(axis) > 1]
    dims = [place.dim for place in parting if not place.is_replicate()]
    strided = {place.dim for place in parting if hasattr(place, "split_factor")}
    if any(dims.count(dim) > 1 + (dim in strided) for dim in dims):
        raise UnsupportedModuleError(f"{tuple(p.shape)} is placed as {p.placements}: one dimension is parted twice")
    for axis in reversed(range(p.device_mesh.ndim) if axes is None else axes):
        place = p.placements[axis]
        if not place.is_replicate():
            first, size = found[place.dim]
            each = -(-size // p.device_mesh.size(axis))
            start = min(each * p.device_mesh.get_local_rank(axis), size)
            found[place.dim] = first + start, min(each, size - start)
    return found
