"""What a training step holds at most on a CPU: by the operating system's count, and as tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dpfast.arithmetic import buffers


def peak_of_tensors(run: Callable[[], object], held: Iterable[Tensor]) -> int:
    """The most bytes that CPU tensors take during ``run``, ``held`` included, which is there before.

    Resident memory is more: what the C allocator cannot give to the next tensor, because it lies in too small pieces,
    stays resident, and how much that is differs from run to run of the same program.
    """
    # The profiler does not see the blocks of dpfast.buffers.
    by_torch = mock.patch.object(buffers, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
    with by_torch, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    now = peak = sum(x.nbytes for x in held)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    if not events:
        raise RuntimeError("the profiler has seen no allocation")
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def resident(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most so far. Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
