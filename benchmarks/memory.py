"""What a training step holds at most on a CPU: by the operating system's count, and as tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from dpfast.report.memory import segments_between_marks


def peak_of_tensors(run: Callable[[], object], held: Iterable[Tensor]) -> int:
    """The most bytes that CPU tensors take during ``run``, ``held`` included, which is there before."""
    return max(most for _, most in segments_between_marks(lambda mark: run(), held, "cpu"))


def resident(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most so far. Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
