"""A training step, private and plain: time and memory of every leg on every workload.

    python benchmarks/step.py                      # the CPU's workloads that have no row yet
    python benchmarks/step.py gpt mlp --again      # these workloads, measured anew
    python benchmarks/step.py gpt --legs "dpfast one-pass" --no-write

Before a leg is timed, its clipped gradient is compared with an fp64 loop over samples. Legs take turns, round after
round; the figure is the median over rounds of (leg / plain) within a round. On a CPU: one thread, CPU time, rounds from
several processes (where a process's memory happens to lie moves its ratios by several percent). Peak memory is measured
in a process of its own, with the C allocator's defaults, and that of tensors alone beside it, which does not depend on
the allocator; on a GPU the allocator counts it. Rows go to
benchmarks/results/step.jsonl, one a leg. A GPU's workloads are the "steps" of benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from legs import LEGS, PRIVATE, C, build
from memory import peak_of_tensors, resident
from rich.console import Console
from rich.table import Table
from rows import RESULTS, Rows, environment, reason
from workloads import WORKLOADS, Workload

from dpfast.arithmetic import buffers
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

# Of the clipped gradient against fp64, the slack of the norm's bound included. In 16 bits the model's own forward and
# backward round, so there twice the error of a loop over samples in that dtype is allowed too.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
PROCESSES = 4
WARM_UP = 2  # rounds of each process: until then its memory grows
SLOW = 10.0  # a leg that takes this many plain steps is timed once, without a round to warm up
SIGMA = 1.0
# One process runs all legs, so one leg's memory would decide how many pages the next one has to get from the system
# (seen: 0 to 14,000 faults of 2 µs a step for the same leg). The C allocator keeps its memory instead, for all.
STEADY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(WORKLOADS))
    parser.add_argument("--legs", nargs="*", choices=[*LEGS], help="these legs; plain and plain+noise always run")
    parser.add_argument("--rounds", type=int, default=5, help=f"on a CPU, of each of {PROCESSES} processes")
    parser.add_argument("--again", action="store_true", help="measure anew what this commit has rows of")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # a child process: this leg's peak, nothing else
    parser.add_argument("--seconds", action="store_true", help=argparse.SUPPRESS)  # likewise: the legs' times
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(json.dumps(_peak_memory(WORKLOADS[options.workloads[0]], options.memory_of)))
        return
    if options.seconds:
        workload = WORKLOADS[options.workloads[0]]
        torch.manual_seed(0)
        model, batch = _model(workload), workload.batch()
        steps = {leg: build(leg, copy.deepcopy(model), workload, SIGMA) for leg in options.legs}
        _interleaved(workload, steps, batch, WARM_UP)
        print(json.dumps(_interleaved(workload, steps, batch, options.rounds)))
        return
    if sys.platform == "linux" and not STEADY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY})
    for name in options.workloads or [w.name for w in WORKLOADS.values() if w.device == "cpu"]:
        workload = WORKLOADS[name]
        table = Rows(RESULTS / "step.jsonl", environment(workload.device))
        if table.has(workload=name) and not options.again:
            print(f"{name}: this commit has its rows in {table.out.name}")
            continue
        chosen = [leg for leg in LEGS if not options.legs or leg in ("plain", "plain+noise", *options.legs)]
        several = workload.device == "cpu"
        rows = measure(workload, chosen, options.rounds, memory=not options.no_memory, in_processes=several)
        if not options.no_write:
            for row in rows:
                table.add(**row)
        show(workload, rows)


def measure(workload: Workload, legs: list[str], rounds: int, memory: bool, in_processes: bool = False) -> list[dict]:
    """One row a leg: milliseconds, ratios to plain and plain+noise, their spread, the gradient's error, peak memory."""
    steps, slow, rows = {}, {}, {leg: {"workload": workload.name, "leg": leg} for leg in legs}
    limit = float("inf")
    torch.manual_seed(0)
    try:
        model, batch = _model(workload), workload.batch()
        exact, allowed = _exact_gradient(workload, model, batch)
    except Exception as error:
        return [{**row, "note": reason(error)} for row in rows.values()]
    for leg in legs:
        try:
            if leg in PRIVATE:
                error = _gradient_error(workload, leg, model, batch, exact)
                rows[leg]["error"] = float(f"{error:.2g}")
                if not error <= allowed:
                    rows[leg]["note"] = "wrong gradient: not timed"
                    continue
            if memory and workload.device == "cuda":
                rows[leg].update(_peak_memory(workload, leg))
            step = build(leg, copy.deepcopy(model), workload, SIGMA)
            first = _timed(workload, step, batch)
            if workload.device == "cuda":  # what the first step compiled and captured is not a step's time
                first = _timed(workload, step, batch)
            if leg == "plain":
                limit = SLOW * first
            if first > limit:  # its gradients may fill the memory; it does not stay
                slow[leg] = [first]
            else:
                steps[leg] = step
            del step
        except Exception as error:  # a leg that cannot run must not take the others with it
            rows[leg]["note"] = reason(error)
        gc.collect()
        if workload.device == "cuda":
            torch.cuda.empty_cache()
    if not {"plain", "plain+noise"} <= steps.keys():  # nothing to compare with: the notes say why
        return list(rows.values())
    if in_processes:
        seconds = _in_processes(workload.name, list(steps), rounds)
    else:
        seconds = _interleaved(workload, steps, batch, rounds)
    seconds.update(slow)
    steps.clear()
    buffers.release()
    for leg, own in seconds.items():
        ratios = {base: [x / y for x, y in zip(own, seconds[base], strict=False)] for base in ("plain", "plain+noise")}
        low, _, high = statistics.quantiles(ratios["plain"], n=4) if len(own) > 1 else 3 * ratios["plain"]
        rows[leg].update(
            ms=round(1e3 * statistics.median(own), 2),
            ratio_plain=round(statistics.median(ratios["plain"]), 3),
            ratio_noise=round(statistics.median(ratios["plain+noise"]), 3),
            quartiles=[round(low, 3), round(high, 3)],
            rounds=len(own),
        )
        if memory and workload.device == "cpu":
            rows[leg].update(_peak_in_own_process(workload.name, leg))
    return list(rows.values())


def _model(workload: Workload) -> torch.nn.Module:
    return workload.build().to(device=workload.device, dtype=workload.dtype)


def _exact_gradient(workload: Workload, model: torch.nn.Module, batch: tuple) -> tuple[dict[str, torch.Tensor], float]:
    """Σ_n c_n g_n of the first samples, in fp64, and the relative error that a leg may have."""
    few = [x[: workload.check_samples] for x in batch]

    def total(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        gradients = loop_over_samples(model, lambda m, *b: workload.losses(m, *b).sum(), *few, dtype=dtype)
        return clipped_sum(gradients, C)

    exact, allowed = total(torch.float64), TOLERANCE[workload.dtype]
    if workload.dtype == torch.bfloat16:
        rounded = total(workload.dtype)
        allowed = max(allowed, 2 * max(relative_error(rounded[name], g) for name, g in exact.items()))
    return exact, allowed


def _gradient_error(workload: Workload, leg: str, model: torch.nn.Module, batch: tuple, exact: dict) -> float:
    """The largest relative error of a parameter's gradient, without noise."""
    own = copy.deepcopy(model)
    few = [x[: workload.check_samples] for x in batch]
    build(leg, own, workload, 0.0)(*few)
    n = len(batch[0])  # the optimizer divided by it
    return max(relative_error(p.grad * n, exact[name]) for name, p in own.named_parameters() if p.requires_grad)


def _timed(workload: Workload, step, batch: tuple) -> float:
    if workload.device == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(*batch)
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    step(*batch)
    return time.process_time() - start


def _interleaved(workload: Workload, steps: dict, batch: tuple, rounds: int) -> dict[str, list[float]]:
    """Seconds per leg and round; the legs' order turns by one place a round."""
    seconds: dict[str, list[float]] = {leg: [] for leg in steps}
    order = list(steps)
    gc.collect()
    gc.disable()
    for i in range(rounds):
        for leg in order[i % len(order) :] + order[: i % len(order)]:
            seconds[leg].append(_timed(workload, steps[leg], batch))
        gc.collect()
    gc.enable()
    return seconds


def _in_processes(name: str, legs: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds per leg and round of :data:`PROCESSES` processes, one after the other."""
    seconds: dict[str, list[float]] = {leg: [] for leg in legs}
    command = [sys.executable, __file__, name, "--seconds", "--rounds", str(rounds), "--legs", *legs]
    for _ in range(PROCESSES):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for leg, own in json.loads(done.stdout.splitlines()[-1]).items():
            seconds[leg] += own
    return seconds


def _peak_memory(workload: Workload, leg: str) -> dict[str, float]:
    """MB that model, batch and three steps need at most, beyond what the process had before; on a CPU also those of
    tensors alone, in a step."""
    torch.manual_seed(0)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # the libraries' own memory
    if workload.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if workload.device == "cuda" else resident("VmRSS")
    step, batch = build(leg, _model(workload), workload, SIGMA), workload.batch()
    for _ in range(3):
        step(*batch)
    peak = torch.cuda.max_memory_allocated() if workload.device == "cuda" else resident("VmHWM")
    found = {"peak_mb": round((peak - before) / 2**20, 1)}
    if workload.device == "cpu":
        model = _model(workload)
        step = build(leg, model, workload, SIGMA)
        found["tensors_mb"] = round(peak_of_tensors(lambda: step(*batch), [*model.parameters(), *batch]) / 2**20, 1)
    return found


def _peak_in_own_process(name: str, leg: str) -> dict[str, float]:
    command = [sys.executable, __file__, name, "--memory-of", leg]
    environment = {k: v for k, v in os.environ.items() if k not in STEADY}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def show(workload: Workload, rows: list[dict]) -> None:
    table = Table(title=workload.title)
    for column in ("leg", "ms", "/ plain", "/ plain+noise", "quartiles", "peak MB", "tensors MB", "error", "note"):
        table.add_column(column, justify="left" if column in ("leg", "note") else "right")
    for r in rows:
        keys = ("leg", "ms", "ratio_plain", "ratio_noise", "quartiles", "peak_mb", "tensors_mb", "error", "note")
        table.add_row(*("" if r.get(k) is None else str(r[k]) for k in keys))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
