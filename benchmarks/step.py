"""A training step, private and plain: time and memory of every leg on every workload.

    python benchmarks/step.py                      # the CPU's workloads that have no row yet, with 1 and 2 threads
    python benchmarks/step.py gpt mlp --again      # these workloads, measured anew
    python benchmarks/step.py --threads 1 --allocator default tuned --fastdp ../fast-differential-privacy
    python benchmarks/step.py gpt --legs "dpfast one-pass" --no-write

Before a leg is timed, its clipped gradient is compared with an fp64 loop over samples. On a CPU each leg has a process
of its own, as a user's training has, with the C library's allocator as it comes; the processes take turns, round after
round, in several generations. One thread is measured in CPU time, several in wall time. The figure is the median over
rounds of (leg / plain) within a round. Peak memory is that of the process, beyond what it had before, the median over
generations, because where the allocator finds room differs from process to process; and that of tensors alone beside
it, which does not depend on the allocator. On a GPU a leg shares a process with the plain ones,
they take turns of several steps, and torch's allocator counts.
`ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2` in front imitates a smaller processor.
Rows go to benchmarks/results/step.jsonl, one a leg. A GPU's workloads are the "steps" of benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from in_turns import ALLOCATORS, AS_IT_IS, Build, Turns, allocator_name, in_fork
from legs import FASTDP, GRAPHED, LEGS, PRIVATE, C, add_fastdp, build
from rich.console import Console
from rich.table import Table
from rows import RESULTS, Rows, environment, processor, reason
from workloads import WORKLOADS, Workload, class_losses

from dpfast.testing import clipped_sum, loop_over_samples

# Of the clipped gradient against fp64, the slack of the norm's bound included. In 16 bits, and in deep models, the
# model's own forward and backward round, so there twice the error of a loop over samples in that dtype is allowed too.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
GENERATIONS = 3
WARM_UP = 2  # steps of each process: until then its memory grows
GPU_WARM_UP = 12  # what is compiled, captured or looked at at first is not a step's time
GPU_TURN = 5  # steps, as a training takes them one after another; the first follow another leg's and are not counted
SLOW = 10.0  # a leg that takes this many plain steps is timed once
SIGMA = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(WORKLOADS))
    parser.add_argument("--legs", nargs="*", help=f"these of {', '.join((*LEGS, FASTDP))}; the plain ones always run")
    parser.add_argument("--rounds", type=int, default=6, help="of each generation of processes")
    parser.add_argument("--generations", type=int, default=GENERATIONS)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--allocator", nargs="*", choices=ALLOCATORS, default=[AS_IT_IS])
    parser.add_argument("--fastdp", type=Path, metavar="PATH", help="sources of fastDP, whose leg runs too")
    parser.add_argument("--again", action="store_true", help="measure anew what this commit has rows of")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    if options.fastdp:
        add_fastdp(options.fastdp)
    chosen = [leg for leg in LEGS if not options.legs or leg in ("plain", "plain+noise", *options.legs)]
    for name in options.workloads or [w.name for w in WORKLOADS.values() if w.device == "cpu"]:
        workload, errors = WORKLOADS[name], {}
        for threads in options.threads:
            for allocator in options.allocator:
                where = {"threads": threads, "allocator": allocator_name(allocator)}
                table = Rows(RESULTS / "step.jsonl", {**environment("cpu"), **processor()})
                if table.has(workload=name, **where, **processor()) and not options.again:
                    print(f"{name}, {where}: this commit has its rows in {table.out.name}")
                    continue
                if not errors:
                    errors = gradient_errors(workload, chosen)
                rows = measure_in_turns(workload, errors, options.rounds, threads, allocator, options.generations)
                rows = [{**row, **where} for row in rows]
                if not options.no_write:
                    for row in rows:
                        table.add(**row)
                show(f"{workload.title}; {threads} threads, {where['allocator']}", rows)


def measure_in_turns(
    workload: Workload,
    errors: dict[str, dict],
    rounds: int,
    threads: int,
    allocator: str,
    generations: int = GENERATIONS,
) -> list[dict]:
    """One row a leg, on a CPU: milliseconds, ratios to plain and plain+noise, their spread, page faults, peak memory.

    Args:
        errors: {leg: what is known of its gradient}; a leg with a "note" is not timed.
    """
    clock = "cpu" if threads == 1 else "wall"
    found = {leg: {"workload": workload.name, "leg": leg, "clock": clock, **known} for leg, known in errors.items()}
    steps: dict[str, list[dict]] = {leg: [] for leg, row in found.items() if "note" not in row}
    peaks: dict[str, list[dict]] = {leg: [] for leg in steps}
    running = list(steps)
    for generation in range(generations):
        turns = Turns({leg: (_warm_up(leg), _builder(workload, leg)) for leg in running}, threads, allocator)

        def step(leg: str, turns: Turns = turns) -> dict:
            answer = turns.ask(leg, "step")
            if "note" in answer:
                found[leg].update(answer)
                running.remove(leg)
            return answer

        for warm_up in range(WARM_UP):
            for leg in list(running):
                first = step(leg)
                if leg == "plain":
                    limit = SLOW * first.get(clock, 0.0)
                # Its gradients may fill the memory. In the first step models are looked at, too.
                if warm_up and first.get(clock, 0.0) > limit:
                    steps[leg] = [first]
                    peaks[leg].append(turns.ask(leg, "peak"))
                    turns.ask(leg, "end")
                    running.remove(leg)
        for i in range(rounds):
            places = i % max(1, len(running))
            for leg in running[places:] + running[:places]:
                answer = step(leg)
                if "note" not in answer:
                    steps[leg].append(answer)
        for leg in running:
            peaks[leg].append(turns.ask(leg, "peak"))
            if generation == 0:  # which does not differ
                found[leg].update(turns.ask(leg, "tensors"))
        turns.close()
    seconds = {leg: [s[clock] for s in own] for leg, own in steps.items() if own and "note" not in found[leg]}
    for leg in seconds:
        found[leg].update({key: statistics.median(peak[key] for peak in peaks[leg]) for key in peaks[leg][0]})
        found[leg].update(_figures(seconds, leg), faults=int(statistics.median(s["faults"] for s in steps[leg])))
    return list(found.values())


def _builder(workload: Workload, leg: str) -> Build:
    def make() -> tuple[Callable[[], None], list[torch.Tensor]]:
        model, batch = _model(workload), workload.batch()
        step = build(leg, model, workload, SIGMA)
        return lambda: step(*batch), [*model.parameters(), *batch]

    return make


TINY = Workload(
    "tiny",
    "the smallest model that needs what the others need",
    lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2)),
    lambda: (torch.randn(2, 3, 4, 4), torch.tensor([0, 1])),
    class_losses,
    2,
)


def _warm_up(leg: str) -> Callable[[], None]:
    def step() -> None:
        build(leg, _model(TINY), TINY, SIGMA)(*TINY.batch())

    return step


def gradient_errors(workload: Workload, legs: list[str]) -> dict[str, dict]:
    """{leg: the relative error of its clipped gradient, and a note where it is too large or the leg cannot run}."""

    def known() -> dict[str, dict]:
        torch.manual_seed(0)
        model, batch = _model(workload), workload.batch()
        exact, allowed = exact_gradient(workload, model, batch)
        return {leg: _checked(workload, leg, model, batch, exact, allowed) for leg in legs}

    return in_fork(known)


def _checked(workload: Workload, leg: str, model: torch.nn.Module, batch: tuple, exact: dict, allowed: float) -> dict:
    if leg not in PRIVATE:
        return {}
    try:
        error = _gradient_error(workload, leg, model, batch, exact)
    except Exception as failure:
        return {"note": reason(failure)}
    row: dict = {"error": float(f"{error:.2g}")}
    return row if error <= allowed else {**row, "note": "wrong gradient: not timed"}


def _figures(seconds: dict[str, list[float]], leg: str) -> dict:
    own, plain = seconds[leg], "plain" + GRAPHED if leg.endswith(GRAPHED) else "plain"
    bases = {"plain": plain, "plain+noise": "plain+noise"}
    ratios = {base: [x / y for x, y in zip(own, seconds[of], strict=False)] for base, of in bases.items()}
    low, _, high = statistics.quantiles(ratios["plain"], n=4) if len(own) > 1 else 3 * ratios["plain"]
    return {
        "ms": round(1e3 * statistics.median(own), 2),
        "ratio_plain": round(statistics.median(ratios["plain"]), 3),
        "ratio_noise": round(statistics.median(ratios["plain+noise"]), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(own),
    }


def measure(workload: Workload, legs: list[str], rounds: int, memory: bool) -> list[dict]:
    """As :func:`measure_in_turns`, all legs in this process: a GPU's allocator keeps what it has.

    Legs that are one CUDA graph are compared with the plain step as one.
    """
    steps, slow, rows = {}, {}, {leg: {"workload": workload.name, "leg": leg} for leg in legs}
    limit = float("inf")
    torch.manual_seed(0)
    try:
        model, batch = _model(workload), workload.batch()
        exact, allowed = exact_gradient(workload, model, batch)
    except Exception as error:
        return [{**row, "note": reason(error)} for row in rows.values()]
    for leg in legs:
        rows[leg].update(_checked(workload, leg, model, batch, exact, allowed))
        if "note" in rows[leg]:
            continue
        try:
            if memory:
                rows[leg].update(_peak_memory(workload, leg))
            step = build(leg, copy.deepcopy(model), workload, SIGMA)
            first = timed(workload, step, batch)
            if workload.device == "cuda":
                first = min(timed(workload, step, batch) for _ in range(GPU_WARM_UP))
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
    seconds = {**_interleaved(workload, steps, batch, rounds), **slow}
    for leg in seconds:
        if not leg.endswith(GRAPHED) or "plain" + GRAPHED in seconds:
            rows[leg].update(_figures(seconds, leg))
    return list(rows.values())


def _model(workload: Workload) -> torch.nn.Module:
    return workload.build().to(device=workload.device, dtype=workload.dtype)


def exact_gradient(workload: Workload, model: torch.nn.Module, batch: tuple) -> tuple[dict[str, torch.Tensor], float]:
    """Σ_n c_n g_n of the first samples, in fp64, and the relative error that a leg may have."""
    few = [x[: workload.check_samples] for x in batch]

    def total(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        gradients = loop_over_samples(model, lambda m, *b: workload.losses(m, *b).sum(), *few, dtype=dtype)
        return clipped_sum(gradients, C)

    exact, allowed = total(torch.float64), TOLERANCE[workload.dtype]
    if workload.dtype == torch.bfloat16 or workload.rounds_itself:
        rounded = total(workload.dtype)
        allowed = max(allowed, 2 * largest_error(rounded, exact))
    return exact, allowed


def _gradient_error(workload: Workload, leg: str, model: torch.nn.Module, batch: tuple, exact: dict) -> float:
    """Without noise."""
    own = copy.deepcopy(model)
    few = [x[: workload.check_samples] for x in batch]
    build(leg, own, workload, 0.0)(*few)
    n = len(batch[0])  # the optimizer divided by it
    return largest_error({name: p.grad * n for name, p in own.named_parameters() if p.requires_grad}, exact)


def largest_error(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of any parameter's gradient, relative to it, or to a millionth of all where that is larger: some are exactly zero
    (the biases of an attention's keys)."""
    least = 1e-6 * math.hypot(*(float(g.double().norm()) for g in exact.values()))
    off = {name: float((g.double() - exact[name].double()).norm()) for name, g in gradients.items()}
    found = [size / max(float(exact[name].double().norm()), least, 1e-300) for name, size in off.items()]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def timed(workload: Workload, step, batch: tuple) -> float:
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
            turn = [timed(workload, steps[leg], batch) for _ in range(GPU_TURN if workload.device == "cuda" else 1)]
            seconds[leg].append(statistics.median(turn[len(turn) // 2 :]))
        gc.collect()
    gc.enable()
    return seconds


def _peak_memory(workload: Workload, leg: str) -> dict[str, float]:
    """MB that model, batch and five steps need at most on a GPU, beyond what the process had before."""
    torch.mm(*(torch.ones(64, 64, device="cuda") for _ in range(2)))  # the libraries' own memory
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step, batch = build(leg, _model(workload), workload, SIGMA), workload.batch()
    for _ in range(5):
        step(*batch)
    return {"peak_mb": round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)}


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title)
    keys = ("leg", "ms", "ratio_plain", "ratio_noise", "quartiles", "faults", "peak_mb", "tensors_mb", "error", "note")
    for key in keys:
        table.add_column(key, justify="left" if key in ("leg", "note") else "right")
    for r in rows:
        table.add_row(*("" if r.get(k) is None else str(r[k]) for k in keys))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
