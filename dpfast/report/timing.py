"""How long a call takes on a device, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEAT_MS = 60.0  # time spent on a figure; the median of what fits


def clock(device: str) -> Callable[[], float]:
    """Gives seconds. On a CPU with one thread the processor's, so that what else runs there is not counted; where
    several work together, and on a GPU once it has finished, those that have passed."""
    if device == "cuda":

        def finished() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return finished
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median time of one call.

    On a GPU: CUDA events around the replay of a CUDA graph, so that the host's launches are not what is timed, the L2
    cache cleared before each (`triton.testing.do_bench`). A call that cannot be captured is an error, not another
    measurement under the same name.
    """
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(captured(call).replay, warmup=20, rep=REPEAT_MS, return_mode="median"))
    now = clock(device)
    call()
    seconds: list[float] = []
    while sum(seconds) < REPEAT_MS / 1e3 and len(seconds) < 7:
        start = now()
        call()
        seconds.append(now() - start)
    return 1e3 * statistics.median(seconds)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `call`, which runs three times beforehand to compile and to allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def copy_bandwidth(device: str, nbytes: int | None = None) -> float:
    """Bytes per second of a device-to-device copy, read and written ones counted."""
    numel = (nbytes or (2**32 if device == "cuda" else 2**20)) // 4
    source = torch.ones(numel, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * milliseconds(lambda: target.copy_(source), device))


def gemm_rate(device: str, dtype: torch.dtype = torch.bfloat16, size: int | None = None) -> float:
    """FLOP per second of one square product through torch; random data, which a GPU clocks lower for than zeros."""
    size = size or (8192 if device == "cuda" else 64)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (1e-3 * milliseconds(lambda: left @ right, device))
