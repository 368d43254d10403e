"""Milliseconds of a call on a device, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import triton.testing

REPEAT_MS = 60.0  # time spent on a figure; the median of what fits


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median time of one call.

    On a GPU: CUDA events around the replay of a CUDA graph, so that the host's launches are not what is timed, the L2
    cache cleared before each (`triton.testing.do_bench`). A call that cannot be captured is an error, not another
    measurement under the same name.
    """
    if device == "cuda":
        return float(triton.testing.do_bench(captured(call).replay, warmup=20, rep=REPEAT_MS, return_mode="median"))
    call()
    seconds = []
    while sum(seconds) < REPEAT_MS / 1e3 and len(seconds) < 7:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
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


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a device-to-device copy, read and written ones counted."""
    source = torch.ones(2**30 if device == "cuda" else 2**18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * milliseconds(lambda: target.copy_(source), device))


def gemm_rate(device: str, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP per second of one square product through torch; random data, which a GPU clocks lower for than zeros."""
    size = 8192 if device == "cuda" else 64
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (1e-3 * milliseconds(lambda: left @ right, device))
