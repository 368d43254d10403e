"""More than one process: clipped sums that cross ranks, noise and Poisson batches that ranks agree on."""

from dpfast.distributed.sampling import PoissonBatches
from dpfast.distributed.secret import SharedSecret
from dpfast.distributed.sums import Sums, sums_of
from dpfast.distributed.wrappers import (
    Wrapper,
    find_wrapper,
    in_process_group,
    is_shard,
    local,
    not_in,
    number_of_ranks,
    ranks_of,
    shard_of,
)

__all__ = [
    "PoissonBatches",
    "SharedSecret",
    "Sums",
    "Wrapper",
    "find_wrapper",
    "in_process_group",
    "is_shard",
    "local",
    "not_in",
    "number_of_ranks",
    "ranks_of",
    "shard_of",
    "sums_of",
]
