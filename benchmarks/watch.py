"""What it takes to watch that a second backward pass repeats the first: docs/bounds.md's table.

    python benchmarks/watch.py [gpt long mlp lora cnn] [--threads 1 2] [--rounds 20] [--no-write]

Wall time within the functions that do it, over that of the two-pass step that they are part of, noise and optimizer
included: the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from legs import build
from rows import RESULTS, Rows, environment
from workloads import WORKLOADS, Workload

from dpfast.modes import second_pass, sketches

WATCHING = ((sketches.Sketches, "take"), (sketches.Sketches, "differing"), (second_pass.FirstPass, "is_weighted"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", default=["gpt", "long", "mlp", "lora", "cnn"])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    for name in options.workloads:
        for threads in options.threads:
            row = measure(WORKLOADS[name], threads, options.rounds)
            print(f"{row['title']}, {threads} threads: {row['share']:.2%} of {row['ms']:.0f} ms", flush=True)
            if not options.no_write:
                Rows(RESULTS / "watch.jsonl", environment("cpu")).add(**row)


def measure(workload: Workload, threads: int, rounds: int) -> dict:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step, batch = build("dpfast two-pass", workload.build(), workload, 1.0), workload.batch()
    taken: list[tuple[float, float]] = []
    for _ in range(rounds + 2):  # two warm up
        with timed_within(WATCHING) as seconds:
            start = time.perf_counter()
            step(*batch)
            taken.append((time.perf_counter() - start, sum(seconds)))
    whole, watched = zip(*taken[2:], strict=True)
    return {
        "workload": workload.name,
        "title": workload.title,
        "threads": threads,
        "rounds": rounds,
        "ms": 1e3 * statistics.median(whole),
        "share": statistics.median(part / step for part, step in zip(watched, whole, strict=True)),
    }


@contextlib.contextmanager
def timed_within(methods: Sequence[tuple[type, str]]) -> Iterator[list[float]]:
    """Gives the seconds of each call of these."""
    seconds: list[float] = []

    def timed(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds


if __name__ == "__main__":
    main()
