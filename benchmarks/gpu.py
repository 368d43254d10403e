"""Everything that needs a GPU, in one command: `make bench-gpu`.

    python benchmarks/gpu.py                                  # all parts, those first whose rows are worth most
    python benchmarks/gpu.py --part kernels --budget-seconds 460 --out FOLDER
    python benchmarks/gpu.py --part steps --fastdp ../fast-differential-privacy

Parts, in the order in which one call takes them: the kernels' tests on the device; the kernels on layers of GPT-2 and
the 1B Llama against cuBLAS; the private steps of both against the plain ones, then both compiled; the whole kernel
table and all steps; the kernels under compute-sanitizer, where it is installed; the device's measured ceilings; the
search for better tiles. A part writes a row the moment it is measured, skips what this commit has a row of, and stops
by itself when its time is used: run it again for the rest. Any GPU will do: a row says which one it is of.
Needs torch, Triton, pytest, hypothesis and rich; Opacus's legs only where Opacus is installed. No network.
Where the sources came without their history, DPFAST_COMMIT says which commit they are.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from legs import FASTDP, GRAPHED_LEGS, add_fastdp
from rows import RESULTS, ROOT, DeviceLost, Rows, environment

PARTS = ("tests", "first-kernels", "first-steps", "compiled", "kernels", "steps", "sanitize", "ceilings", "tiles")
SHARE = {"tests": 0.3, "first-kernels": 0.5}  # of the time that is left, for parts that others must not wait for
FIRST_LAYERS = ("GPT-2 ", "Llama-3.2-1B ")
FIRST_CONTENDERS = ("dpfast", "cuBLAS", "torch")
FIRST_WORKLOADS = ("gpt2-1024", "llama-1b")
FIRST_LEGS = ("plain", "plain+noise", "dpfast one-pass")
AGAIN = 3  # exit status of a part whose device was lost to one row: a new process takes the next
STATIC = ("test_ahead.py", "test_traffic.py")  # about the compiler, not the device
VERBS = (
    "outer_product",
    "outer_norm",
    "gram_norm",
    "weighted_sum",
    "grouped_norm",
    "lookup_norm",
)  # tested before others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", choices=(*PARTS, "all", "smoke"), default="all")
    parser.add_argument("--budget-seconds", type=float, default=540, help="of the whole call")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder that rows are appended in")
    parser.add_argument("--fastdp", type=Path, metavar="PATH", help="sources of fastDP, whose steps are taken too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: nothing to measure")
    if options.fastdp:
        add_fastdp(options.fastdp)
    if options.part == "smoke":
        smoke(options.device)
    elif options.part == "all":
        sys.exit(run_all(options))
    else:
        sys.exit(run(options.part, options.out, options.device, options.budget_seconds))


def run_all(options: argparse.Namespace) -> int:
    """Every part, within the one budget; the highest status."""
    until = time.monotonic() + options.budget_seconds
    status = 0
    for part in PARTS:
        if (left := until - time.monotonic()) > 0:
            status = max(status, run_alone(part, options, SHARE.get(part, 1.0) * left))
    return status


def run_alone(part: str, options: argparse.Namespace, seconds: float) -> int:
    """The part in a process of its own, so that a lost device or a leak ends with it."""
    command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device, "--part", part]
    command += ["--fastdp", str(options.fastdp)] if options.fastdp else []
    until = time.monotonic() + seconds
    status = AGAIN
    while status == AGAIN and (left := until - time.monotonic()) > 0:
        status = subprocess.run([*command, "--budget-seconds", str(left)]).returncode
    return status


def run(part: str, out: Path, device: str, budget_seconds: float) -> int:
    """Exit status of one part: 0 where it is finished or out of time, 1 where something failed, AGAIN."""
    until = time.monotonic() + budget_seconds
    table = part.removeprefix("first-")
    name = {"steps": "step.jsonl"}.get(table, f"{table}.jsonl")
    rows = Rows(out / name, environment(device), known=[RESULTS / name])
    print(f"{part}: {rows.environment['machine']}, commit {rows.environment['commit']}", flush=True)
    try:
        status = RUNNERS[part](rows, device, lambda: max(0.0, until - time.monotonic()))
    except DeviceLost as lost:
        print(f"the device was lost: {lost}")
        status = AGAIN
    print(f"{part}: rows in {rows.out}", flush=True)
    return status


Left = Callable[[], float]  # the seconds that are left


def tests(rows: Rows, device: str, left: Left) -> int:
    """Every kernel once, then the kernels' tests, a row a file. Without a GPU they run interpreted."""
    workers = ["-n", "8"] if importlib.util.find_spec("xdist") and (os.cpu_count() or 1) >= 8 else []
    folder = ROOT / "tests" / "kernels"
    paths = dict.fromkeys([*(folder / f"test_{verb}.py" for verb in VERBS), *sorted(folder.glob("test_*.py"))])
    commands = {"smoke": [sys.executable, __file__, "--part", "smoke", "--device", device]}
    for path in paths:
        if path.name not in STATIC:
            commands[path.name] = [sys.executable, "-m", "pytest", "-q", "--durations=3", *workers, str(path)]
    failed = 0
    for name, command in commands.items():
        if rows.has(file=name, passed=True) or left() <= 0:
            continue
        row = rows.add(file=name, **_outcome(command, left()))
        failed += row["passed"] is False
        word = {True: "passed", False: "FAILED", None: "not finished"}[row["passed"]]
        print(f"{name}: {word} in {row['seconds']} s", flush=True)
    return int(failed > 0)


def sanitize(rows: Rows, device: str, left: Left) -> int:
    """Every kernel once under memcheck, without torch's own memory pool, whose slack hides overruns."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed")
    elif not rows.has(check="memcheck", passed=True):
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--part", "smoke"]
        row = rows.add(check="memcheck", **_outcome(command, left(), PYTORCH_NO_CUDA_MEMORY_CACHING="1"))
        print(row["said"])
        return int(row["passed"] is False)
    return 0


def _outcome(command: list[str], seconds: float, **variables: str) -> dict:
    """Whether the command passed, None where its time ran out, and the end of what it said."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **variables}, cwd=ROOT
        )
        passed, said = done.returncode == 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        passed, said = None, f"not finished in {seconds:.0f} s"
    return {"passed": passed, "seconds": round(time.monotonic() - start, 1), "said": said.strip()[-1500:]}


def smoke(device: str, dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)) -> None:
    """Every kernel on ragged, thin and short layers, compared with fp64."""
    from contenders import CONTENDERS, TOLERANCE, error, exact
    from layers import Layer

    sizes = {"ragged": (2, 70, 96, 130), "thin": (2, 40, 8, 144), "short": (5, 1, 64, 80)}
    for name, shape in sizes.items():
        for dtype in dtypes:
            for verb, contenders in CONTENDERS.items():
                inputs = Layer(name, *shape, dtype, lookup=verb == "lookup norm").inputs(device)
                found = error(verb, contenders["dpfast"](*inputs), exact(verb, *inputs))
                print(f"{name}, {dtype}, {verb}: relative error {found:.1e}", flush=True)
                assert found <= TOLERANCE["dpfast"], "wrong"


def ceilings(rows: Rows, device: str, left: Left) -> int:
    import kernel_table

    print(rows.add(**kernel_table.ceilings(device)))
    return 0


def kernels(rows: Rows, device: str, left: Left, first: bool = False) -> int:
    import kernel_table
    from layers import LAYERS

    layers, contenders = LAYERS, kernel_table.NAMES
    if first:
        layers = [layer for layer in LAYERS if layer.name.startswith(FIRST_LAYERS)]
        contenders = FIRST_CONTENDERS
    ceiling = kernel_table.ceilings(device)
    if not kernel_table.measure(rows, ceiling, device, lambda: left() <= 0, layers, contenders):
        print("out of time: run it again for the rest")
    return 0


def steps(rows: Rows, device: str, left: Left, first: bool = False) -> int:
    import step

    for workload in step.WORKLOADS.values():
        graphed = GRAPHED_LEGS if device == "cuda" else ()
        legs = (*(FIRST_LEGS if first else step.LEGS), *graphed)
        missing = [leg for leg in legs if not rows.has(workload=workload.name, leg=leg)]
        if workload.device != device or (first and workload.name not in FIRST_WORKLOADS) or not missing or left() <= 0:
            continue
        bases = FIRST_LEGS[:2]  # a ratio is to steps of the same run
        for chosen in [*([*bases, leg] for leg in legs if leg in missing and leg not in (*bases, *graphed)), graphed]:
            asked = [leg for leg in chosen if leg in missing]
            if asked and left() > 0:
                measured = _measured if device == "cpu" else _in_a_process
                for row in measured(workload.name, [*bases, *(leg for leg in chosen if leg not in bases)]):
                    if row["leg"] in asked:
                        rows.add(**row)
                        missing.remove(row["leg"])
    return 0


def _in_a_process(name: str, legs: list[str]) -> list[dict]:
    """The rows of these legs from a process of their own, as a user's training has one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measured, name, legs).result()


def _measured(name: str, legs: list[str]) -> list[dict]:
    import step

    if FASTDP in legs and FASTDP not in step.LEGS:  # a new process has the path of its sources, not the leg
        add_fastdp(Path(importlib.util.find_spec("fastDP").origin).parents[1])
    workload = step.WORKLOADS[name]
    return step.measure(workload, legs, rounds=9, memory=workload.device == "cuda")


def compiled(rows: Rows, device: str, left: Left) -> int:
    import compiled as steps_as_graphs

    for workload in steps_as_graphs.ON_GPU.values():
        if workload.device == device and left() > 0 and not rows.has(workload=workload.name):
            for row in steps_as_graphs.measure(workload, steps_as_graphs.ROUNDS):
                rows.add(**row)
                print(f"{row['title']} | {row['leg']} | {row['ms']:.2f} ms, {row['ratio']:.3f}", flush=True)
    return 0


def tiles(rows: Rows, device: str, left: Left) -> int:
    import tile_search

    tile_search.measure(rows, device, lambda: left() <= 0)
    proposal = "".join(f"{line}\n" for line in tile_search.proposal(rows))
    rows.out.with_name("tiles-proposal.txt").write_text(proposal)
    print(f"for kernels/_tile_rows.py, each before the row of its conditions:\n{proposal or 'nothing better'}")
    return 0


RUNNERS = {
    "tests": tests,
    "sanitize": sanitize,
    "ceilings": ceilings,
    "first-kernels": partial(kernels, first=True),
    "first-steps": partial(steps, first=True),
    "compiled": compiled,
    "kernels": kernels,
    "steps": steps,
    "tiles": tiles,
}

if __name__ == "__main__":
    main()
