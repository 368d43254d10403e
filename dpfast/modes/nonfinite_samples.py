"""Counts the samples that clipping drops, without making the host wait for a GPU."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import in_cuda_graph
from dpfast.errors import warn_caller


class DroppedSamples:
    """How many samples had a gradient norm of inf or NaN; the first of them raise a warning.

    Args:
        message: of the warning, with {count} and {n}.

    On a CPU a step's count is known at once. On a GPU it is copied to the host behind the step's work and read when
    it has arrived, a step or two later, or when :attr:`count` is asked for. A step captured in a CUDA graph is not
    counted, because a replay runs no Python.
    """

    message = (
        "{count} of {n} samples have a gradient norm that is inf or NaN; they are dropped from the clipped sum (clip "
        "factor 0). model.nonfinite_samples counts them from here on."
    )

    def __init__(self, message: str | None = None) -> None:
        self.message = message or self.message
        self._count = 0
        self._on_the_way: deque[tuple[torch.cuda.Event, Tensor, int]] = deque()

    def add(self, norms: Tensor) -> None:
        """Counts the samples of one step, norms (..., N)."""
        if norms.device.type == "cpu" and math.isfinite(norms.sum()):
            return  # as nearly always
        finite = torch.atleast_2d(norms).abs() < math.inf  # in fewer calls than isfinite
        dropped = (~finite).flatten(0, -2).any(0).sum()
        n = norms.shape[-1]
        if dropped.device.type != "cuda":
            self._arrived(int(dropped), n)
            return
        if in_cuda_graph():
            return
        on_host = torch.empty((), dtype=dropped.dtype, pin_memory=True)
        on_host.copy_(dropped, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._on_the_way.append((event, on_host, n))
        while self._on_the_way and self._on_the_way[0][0].query():
            _, on_host, n = self._on_the_way.popleft()
            self._arrived(int(on_host), n)

    @property
    def count(self) -> int:
        """Of all steps so far; waits for those whose count is still on its way."""
        while self._on_the_way:
            event, on_host, n = self._on_the_way.popleft()
            event.synchronize()
            self._arrived(int(on_host), n)
        return self._count

    def _arrived(self, count: int, n: int) -> None:
        if count and not self._count:
            warn_caller(self.message.format(count=count, n=n))
        self._count += count

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the count."""
        return {**self.__dict__, "_count": self.count, "_on_the_way": deque()}
