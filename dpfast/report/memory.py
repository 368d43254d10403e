"""What a call holds at most: bytes of tensors alone."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from dpfast.arithmetic import buffers

_MARK = "dpfast: a mark"


def segments_between_marks(
    run: Callable[[Callable[[], None]], object], held: Iterable[Tensor], device: str
) -> list[tuple[int, int]]:
    """Bytes of tensors: at the start of each segment, and the most within it; segments end at marks.

    Args:
        run: gets what sets a mark.
        held: what is there before.

    Resident memory is more: what the C allocator cannot give to the next tensor, because it lies in too small pieces,
    stays resident, and how much that is differs from run to run of the same program. On a GPU the device's peak
    statistics are reset.
    """
    segments: list[tuple[int, int]] = []
    if device == "cuda":
        start = torch.cuda.memory_allocated()

        def mark() -> None:
            nonlocal start
            segments.append((start, torch.cuda.max_memory_allocated()))
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()

        torch.cuda.reset_peak_memory_stats()
        run(mark)
        mark()
        return segments
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says on stderr that it starts and stops
    gc.collect()  # what it would free meanwhile was not seen to be allocated
    with _seen_by_the_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(_mark)
    now = sum(x.nbytes for x in held)
    segments = [(now, now)]
    events = profiled.profiler.kineto_results.events()
    if not any(e.name() == "[memory]" for e in events):
        raise RuntimeError("the profiler has seen no allocation")
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == _MARK:
            segments.append((now, now))
        elif event.name() == "[memory]":
            now += event.nbytes()
            segments[-1] = (segments[-1][0], max(segments[-1][1], now))
    return segments


def _mark() -> None:
    with record_function(_MARK):
        pass


@contextmanager
def _seen_by_the_profiler() -> Iterator[None]:
    """The profiler does not see the memory of ``buffers``."""
    before = buffers.empty, buffers.place_for_others
    buffers.empty = lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device)
    buffers.place_for_others = lambda rows, columns, like: None
    try:
        yield
    finally:
        buffers.empty, buffers.place_for_others = before


def storages(x: Any, seen: set[int] | None = None) -> Iterator[tuple[StorageWeakRef, int]]:
    """What an object of ours (a factor) keeps alive: storages, each once, and their bytes."""
    seen = set() if seen is None else seen
    if isinstance(x, Tensor):
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield StorageWeakRef(storage), storage.nbytes()
        return
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, dict):
        parts: Iterable[Any] = x.values()
    elif isinstance(x, (tuple, list)):
        parts = x
    else:
        parts = vars(x).values() if type(x).__module__.startswith("dpfast.") and hasattr(x, "__dict__") else ()
    yield from itertools.chain.from_iterable(storages(part, seen) for part in parts)
