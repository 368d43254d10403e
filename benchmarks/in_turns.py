"""Steps that take turns, each in a process of its own, as a user's does: its memory is its own affair."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import platform
import resource
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from memory import peak_of_tensors, resident
from rows import reason

AS_IT_IS, TUNED = "default", "tuned"
ALLOCATORS = (AS_IT_IS, TUNED)
_MALLOPT = {
    -4: 0,
    -1: 2**31 - 1,
}  # M_MMAP_MAX and M_TRIM_THRESHOLD: no block of its own for large ones, nothing given back

Step = Callable[[], None]
Build = Callable[[], tuple[Step, list[torch.Tensor]]]
"""Makes a step, and says which tensors are there before it: parameters and batch."""
WarmUp = Callable[[], None]
"""Takes a tiny step, with which all code is there that a step needs."""


class Turns:
    """Processes that take a step when told. They are forked, so that none imports anything again; the process that
    starts them must not have computed anything, because threads do not survive a fork.

    Args:
        threads: torch's, of each.
        allocator: "default": the C library's as it comes; "tuned": told to keep its memory.
    """

    def __init__(self, builds: dict[str, tuple[WarmUp, Build]], threads: int, allocator: str):
        self._ends: dict[str, Connection] = {}
        self._processes = []
        fork = multiprocessing.get_context("fork")
        for name, (warm_up, build) in builds.items():
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(theirs, warm_up, build, threads, allocator), daemon=True)
            process.start()
            theirs.close()
            self._ends[name] = ours
            self._processes.append(process)

    def ask(self, name: str, what: str) -> dict[str, Any]:
        """ "step": seconds by "cpu" and "wall", page "faults". "peak": MB at most so far, and of code. "tensors": MB of
        tensors alone in a step more. Ends the process: "end", or an error, whose reason is a "note"."""
        end = self._ends[name]
        try:
            end.send(what)
            answer: dict[str, Any] = end.recv()
        except (EOFError, BrokenPipeError):
            answer = {"note": "its process has ended: no memory?"}
        if what == "end" or "note" in answer:
            self._ends.pop(name).close()
        return answer

    def close(self) -> None:
        for name in list(self._ends):
            self.ask(name, "end")
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(end: Connection, warm_up: WarmUp, build: Build, threads: int, allocator: str) -> None:
    if allocator == TUNED:
        for option, value in _MALLOPT.items():
            ctypes.CDLL(None).mallopt(option, value)
    warnings.simplefilter("ignore")  # hooks announce themselves
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    worker = None
    while (what := end.recv()) != "end":
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                worker = worker or _Worker(warm_up, build)
                answer = worker.answer(what)
            end.send(answer)
        except Exception as error:
            end.send({"note": reason(error)})
    end.send({})
    os._exit(0)  # what a forked process would clean up is not its own


class _Worker:
    def __init__(self, warm_up: WarmUp, build: Build):
        started = resident("VmRSS")
        warm_up()
        self.before = resident("VmRSS")  # imported code, and libraries that have run
        self.code = self.before - started
        self.step, self.held = build()

    def answer(self, what: str) -> dict[str, Any]:
        if what == "step":
            return _timed(self.step)
        if what == "peak":
            return {"peak_mb": _megabytes(resident("VmHWM") - self.before), "code_mb": _megabytes(self.code)}
        return {"tensors_mb": _megabytes(peak_of_tensors(self.step, self.held))}


def _timed(step: Step) -> dict[str, Any]:
    time.sleep(0.01)  # threads of the process before may still spin
    faults, wall, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter(), time.process_time()
    step()
    return {
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    }


def _megabytes(size: int) -> float:
    return round(size / 2**20, 1)


def in_fork(call: Callable[[], Any]) -> Any:
    """``call()``, computed in a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def run() -> None:
        warnings.simplefilter("ignore")
        theirs.send(call())
        os._exit(0)

    process = fork.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def allocator_name(allocator: str) -> str:
    """What a row says: which C library, or what stands in its place."""
    name = " ".join(platform.libc_ver()) or platform.system()
    if preloaded := os.environ.get("LD_PRELOAD"):
        name = os.path.basename(preloaded.split(":")[0])
    told = sorted(key for key in os.environ if key.startswith("MALLOC_") or key == "GLIBC_TUNABLES")
    return ", ".join([name, *(["tuned"] if allocator == TUNED else []), *told])
