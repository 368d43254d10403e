"""Outer products that wait for others of their shape: one launch for many small factors, not one each.

A LoRA model has dozens of thin factors of one shape. Where kernels run, those that would be used up at once wait until
others have come; factors that are kept as they are have no need to, and the reference has no launches to save.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from dpfast.arithmetic import SquaredNorm, cost, ops, stream_here
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.outer_product import OuterProduct

MAX_BYTES = 2**28
"""The most bytes of inputs that wait on one stream: what this library may hold longer than it needs to. A GPU of
4 TB/s reads them in 60 microseconds, some ten times what a launch costs."""


class Waiting:
    """The outer products of one backward pass that wait.

    Args:
        keep: what they become: gradients written out, with their norms (True), or norms alone.
    """

    def __init__(self, *, keep: bool):
        self._keep = keep
        # By stream: a queue that is full is taken on the stream that its factors were computed on.
        self._queues: dict[Hashable, list[tuple[OuterProduct, Callable[[Dense | SquaredNorm], None]]]] = {}

    def wants(self, factor: Factor) -> bool:
        """Whether the factor would be used up at once and is of the shapes that are better taken together."""
        if not isinstance(factor, OuterProduct) or not ops.groups(factor.activations, factor.backprops):
            return False
        return factor.keeps if self._keep else cost.norm_way(factor.activations.shape[1], *factor.shape) == "direct"

    def add(self, factor: OuterProduct, receive: Callable[[Dense | SquaredNorm], None]) -> None:
        """Has ``receive`` called with what becomes of the factor, now or later."""
        stream = stream_here(factor.activations.device)
        queue = self._queues.setdefault(stream, [])
        queue.append((factor, receive))
        if sum(f.nbytes for f, _ in queue) > MAX_BYTES:
            self._take(stream)

    def take(self) -> None:
        """Takes all that wait."""
        for stream in list(self._queues):
            self._take(stream)

    def _take(self, stream: Hashable) -> None:
        queue = self._queues.pop(stream)
        results = ops.grouped_direct([(f.activations, f.backprops) for f, _ in queue], keep=self._keep)
        for (_, receive), (norm, error, values) in zip(queue, results, strict=True):
            receive(norm if values is None else Dense(values, error=error, norm=norm))


def wait_as_factors(activations: Tensor, backprops: Tensor) -> bool:
    """Whether pairs (N, T, ·) are of those that :class:`Waiting` is for."""
    return activations.dim() == 3 and backprops.dim() == 3 and ops.groups(activations, backprops)
