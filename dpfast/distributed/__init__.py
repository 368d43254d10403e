"""More than one process: clipped sums that cross ranks, noise and Poisson batches that ranks agree on."""

from dpfast.distributed.agreement import refuse_disagreement
from dpfast.distributed.noise import add_noise
from dpfast.distributed.placements import is_parted, is_shard, local, placed
from dpfast.distributed.sampling import PoissonBatches
from dpfast.distributed.secret import SharedSecret
from dpfast.distributed.sums import Sums, part_of, parts_of, sums_of, told_to_all
from dpfast.distributed.unit_sampling import UnitPoissonSampler
from dpfast.distributed.wrappers import (
    Wrapper,
    find_wrapper,
    in_process_group,
    not_in,
    number_of_ranks,
    ranks_of,
)

__all__ = [
    "PoissonBatches",
    "SharedSecret",
    "Sums",
    "UnitPoissonSampler",
    "Wrapper",
    "add_noise",
    "find_wrapper",
    "in_process_group",
    "is_parted",
    "is_shard",
    "local",
    "not_in",
    "number_of_ranks",
    "part_of",
    "parts_of",
    "placed",
    "ranks_of",
    "refuse_disagreement",
    "sums_of",
    "told_to_all",
]
