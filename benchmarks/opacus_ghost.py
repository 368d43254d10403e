"""A step of Opacus's own pipelines, as they are and with ``dpfast.opacus.install()``: docs/migration.md's table.

    python benchmarks/opacus_ghost.py [gpt lora cnn long mlp] [--modes ghost hooks] [--rounds 9] [--no-write]

One thread, CPU time. The clipped gradients are compared before anything is timed. Both take turns, round after round;
the figure is the median over rounds of (as it is / with dpfast) within a round, so above 1 is faster.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
import warnings

import opacus
import torch
from legs import build
from rows import RESULTS, Rows, environment
from workloads import WORKLOADS, Workload

import dpfast.opacus
from dpfast.testing import relative_error

# Both run in one process: one's memory would decide how many pages the other has to get from the system.
STEADY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
TOLERANCE = 1e-3  # dpfast's norms are upper ends, so its clip factors are lower by up to that; never higher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", default=["gpt", "lora", "cnn"])
    parser.add_argument("--modes", nargs="*", default=["ghost", "hooks"], choices=["ghost", "hooks"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    if sys.platform == "linux" and not STEADY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.workloads:
        for mode in options.modes:
            row = measure(WORKLOADS[name], mode, options.rounds)
            print(f"{row['title']}, {mode}: {said(row)}", flush=True)
            if not options.no_write:
                Rows(RESULTS / "install.jsonl", {**environment("cpu"), "opacus": opacus.__version__}).add(**row)


def said(row: dict) -> str:
    if "note" in row:
        return row["note"]
    return (
        f"{row['ms_as_it_is']:7.1f} ms as it is, {row['ms']:7.1f} ms with dpfast: {row['times']:.2f} times as fast "
        f"({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f}), gradients differ by {row['error']:.0e}"
    )


def measure(workload: Workload, mode: str, rounds: int) -> dict:
    row = {"workload": workload.name, "title": workload.title, "mode": mode, "rounds": rounds}
    mode = f"opacus {mode}"
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch()
    error = max(
        relative_error(ours, theirs)
        for ours, theirs in zip(
            *(clipped(workload, mode, model, batch, install) for install in (True, False)), strict=True
        )
    )
    if not error <= TOLERANCE:
        return {**row, "error": error, "note": f"the clipped gradients differ by {error:.1e}: not timed"}
    steps = {install: build(mode, copy.deepcopy(model), workload, 1.0) for install in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    gc.disable()
    for i in range(rounds + 1):
        for install in (True, False) if i % 2 else (False, True):
            seconds[install].append(timed(steps[install], batch, install))
        gc.collect()
    gc.enable()
    with_dpfast, without = seconds[True][1:], seconds[False][1:]  # the first round warms up
    low, ratio, high = statistics.quantiles([y / x for x, y in zip(with_dpfast, without, strict=True)], n=4)
    ms_as_it_is, ms = (1e3 * statistics.median(found) for found in (without, with_dpfast))
    return {**row, "ms_as_it_is": ms_as_it_is, "ms": ms, "times": ratio, "quartiles": [low, high], "error": error}


def clipped(workload: Workload, mode: str, model: torch.nn.Module, batch: tuple, install: bool) -> list[torch.Tensor]:
    """The clipped gradients of a step without noise."""
    own = copy.deepcopy(model)
    timed(build(mode, own, workload, 0.0), batch, install)
    return [p.grad for p in own.parameters() if p.requires_grad]


def timed(step, batch: tuple, install: bool) -> float:
    """Seconds of CPU time."""
    if install:
        dpfast.opacus.install()
    start = time.process_time()
    step(*batch)
    taken = time.process_time() - start
    dpfast.opacus.uninstall()
    return taken


if __name__ == "__main__":
    main()
