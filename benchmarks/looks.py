"""What it takes to look whether samples meet, at the first forward pass and at later ones: docs/layouts.md's table.

    python benchmarks/looks.py [gpt long mlp lora cnn] [--threads 1 2] [--no-write]

Wall time of ``Probe.look``, and of the look at the loss, over that of the one-pass step around them, noise and
optimizer included. Looks after the 8th forward pass are taken to cost what the 8th costs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from legs import build
from rows import RESULTS, Rows, environment
from watch import timed_within
from workloads import WORKLOADS, Workload

from dpfast.looks import Probe, looks_again_at
from dpfast.modes import mixed_losses

STEPS, ALL = 20, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", default=["gpt", "long", "mlp", "lora", "cnn"])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    for name in options.workloads:
        for threads in options.threads:
            row = measure(WORKLOADS[name], threads)
            shown = f"first {row['first']:.1f} steps, later {row['later']:.1f}, {row['share']:.2%} of {ALL}"
            print(f"{row['title']}, {threads} threads: {shown}", flush=True)
            if not options.no_write:
                Rows(RESULTS / "looks.jsonl", environment("cpu")).add(**row)


def measure(workload: Workload, threads: int) -> dict:
    """In steps without a look: of the first two forward passes together, of a later one, and of so many steps."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step, batch = build("dpfast one-pass", workload.build(), workload, 1.0), workload.batch()
    looks, others = [], []
    for _ in range(STEPS):
        with timed_within([(Probe, "look"), (mixed_losses, "check_apart")]) as seconds:
            start = time.perf_counter()
            step(*batch)
            looks.append(sum(seconds))
            others.append(time.perf_counter() - start - looks[-1])
    usual = statistics.median(others)
    later = looks[7]
    number = sum(map(looks_again_at, range(2, ALL)))
    return {
        "workload": workload.name,
        "title": workload.title,
        "threads": threads,
        "ms": 1e3 * usual,
        "first": (looks[0] + looks[1]) / usual,
        "later": later / usual,
        "share": (looks[0] + looks[1] + number * later) / (ALL * usual),
    }


if __name__ == "__main__":
    main()
