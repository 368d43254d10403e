"""More than one process: clipped sums that cross ranks, noise and Poisson batches that ranks agree on."""

from dpfast.distributed.ddp import DDPSums
from dpfast.distributed.sampling import PoissonBatches
from dpfast.distributed.secret import SharedSecret
from dpfast.distributed.wrappers import find_wrapper, in_process_group, not_in

__all__ = ["DDPSums", "PoissonBatches", "SharedSecret", "find_wrapper", "in_process_group", "not_in"]
