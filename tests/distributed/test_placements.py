"""Where a rank's part of a DTensor is, without any ranks."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dpfast.distributed.placements import extents
from dpfast.errors import UnsupportedModuleError


def parts(shape, mesh, placements):
    """Of every rank, what it has."""
    for place in product(*map(range, mesh)):
        grid = SimpleNamespace(ndim=len(mesh), size=mesh.__getitem__, get_local_rank=place.__getitem__)
        yield extents(SimpleNamespace(shape=shape, placements=placements, device_mesh=grid))


@pytest.mark.parametrize("shape", [(13, 5), (4, 4), (1, 7), (0, 3)])
@pytest.mark.parametrize(
    ("placements", "times"),
    [
        ((Shard(0),), 1),
        ((Shard(0), Shard(1)), 1),
        ((_StridedShard(0, split_factor=3), Shard(0)), 1),
        ((Shard(0), Replicate()), 3),
        ((Replicate(), _StridedShard(0, split_factor=3), Shard(0)), 2),
    ],
)
def test_parts_of_all_ranks_are_the_whole(shape, placements, times):
    """Each entry as often as there are copies."""
    seen = torch.zeros(shape)
    for (row, rows), (column, columns) in parts(shape, ((4,), (4, 3), (2, 4, 3))[len(placements) - 1], placements):
        seen[row : row + rows, column : column + columns] += 1
    assert (seen == times).all()


def test_an_axis_of_one_rank_parts_nothing():
    assert list(parts((8, 3), (4, 1), (Shard(0), Shard(0)))) == [[(2 * rank, 2), (0, 3)] for rank in range(4)]


def test_a_dimension_that_is_parted_from_left_to_right_is_refused():
    with pytest.raises(UnsupportedModuleError, match="parted twice"):
        list(parts((12, 3), (2, 3), (Shard(0), Shard(0))))
