"""What of a private step on a CPU is a loop of calls over samples, or stays on one core, and how much of its time.

    python benchmarks/loops.py                                       with the instructions that the machine has
    MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/loops.py          large products by oneDNN, a call a sample

One thread, CPU time; rows go to results/loops.jsonl, and report.py writes them into docs/step.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from legs import build
from loops_report import LOOPS
from rows import RESULTS, Rows, environment, processor
from workloads import WORKLOADS

from dpfast.arithmetic import products
from dpfast.opacus import noise

STEPS = 5


class Counted:
    """Counts and times the calls of a function."""

    def __init__(self, function: Callable[..., Any], calls_of: Callable[..., int]):
        self.function, self.calls_of = function, calls_of
        self.calls, self.seconds = 0, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return self.function(*args, **options)
        finally:
            self.seconds += time.process_time() - start
            self.calls += self.calls_of(*args)


def measure(name: str) -> Iterator[dict]:
    """A row for each of LOOPS: how many calls, and the share of the step's time."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    batch = workload.batch()
    step = build("dpfast one-pass", workload.build(), workload, 1.0)
    counted = {
        "oneDNN's products": (products, "onednn", lambda x, y: 1),
        "narrow products": (products, "_narrow", lambda x, y: -(-len(x) // products._IN_ONE_CALL)),
        "products one by one": (products, "_one_by_one", lambda x, y: len(x)),
        "noise": (noise, "add_noise_in_order", lambda *_: 1),
    }
    shares: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    for i in range(STEPS + 1):
        counts = {loop: Counted(getattr(owner, name), calls) for loop, (owner, name, calls) in counted.items()}
        patches = [mock.patch.object(owner, name, counts[loop]) for loop, (owner, name, _) in counted.items()]
        for patch in patches:
            patch.start()
        start = time.process_time()
        step(*batch)
        whole = time.process_time() - start
        for patch in patches:
            patch.stop()
        for loop, count in counts.items() if i else ():
            shares[loop].append(count.seconds / whole)
    for loop, count in counts.items():
        yield {"workload": name, "loop": loop, "calls": count.calls, "share": round(statistics.median(shares[loop]), 4)}


def main() -> None:
    torch.set_num_threads(1)
    table = Rows(RESULTS / "loops.jsonl", {**environment("cpu"), **processor()})
    for name in (w.name for w in WORKLOADS.values() if w.device == "cpu"):
        for row in measure(name):
            print(table.add(multiplier=products.multiplier(), **row), flush=True)


if __name__ == "__main__":
    main()
