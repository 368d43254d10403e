"""The section of docs/step.md on what does not grow with the cores, from the rows of loops.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rows import RESULTS, read

LOOPS = {
    "oneDNN's products": "a call a sample, or a clipped sum, each on all threads",
    "narrow products": "a call for four samples, at most four threads",
    "products one by one": "a call a sample, each on all threads",
    "noise": "one generator, one thread",
}


def lines(results: Path = RESULTS) -> Iterator[str]:
    newest = {(row["multiplier"], row["workload"], row["loop"]): row for row in read(results / "loops.jsonl")}
    if not newest:
        return
    machine = next(reversed(newest.values()))
    where = f"{machine['cpu']}, torch {machine['torch']}; *oneDNN*: MKL told to use AVX2"
    yield ""
    yield "## Every core"
    yield ""
    yield (
        "What of the one-pass step does not grow with the cores, by `python benchmarks/loops.py`: calls a step, and "
        f"their share of its CPU time with one thread ({where}). All else is torch's own parallel operations on whole "
        "batches, or on blocks of a megabyte for each thread."
    )
    columns = list(dict.fromkeys((who, workload) for who, workload, _ in newest))
    yield ""
    yield f"| loop | {' | '.join(f'{workload}, {who}' for who, workload in columns)} |"
    yield "|---|" + "--:|" * len(columns)
    for loop, how in LOOPS.items():
        rows = (newest.get((*column, loop)) for column in columns)
        cells = ("–" if row is None else f"{row['calls']}: {100 * row['share']:.1f} %" for row in rows)
        yield f"| {loop}: {how} | {' | '.join(cells)} |"
    yield ""
    yield (
        "The plan for 16 to 128 cores: oneDNN's calls, of at least 2²² multiply-adds, are too small for so many, so "
        "samples have to be shared among threads, each call on one, as MKL shares out the batches that it is given; a "
        "sample's bits then stay what they are with one thread, which is what tests/arithmetic/test_threads.py asks of "
        "both. Narrow products go four samples to a call because their bits depend on how many there are; calls of "
        "four can run beside each other. None of this is built: there was no machine of more than two cores to measure "
        "it on. Noise of 2²⁰ numbers and more is drawn by blocks, each from a generator of its own, on all threads, "
        "and these rows have it on one still; of fewer, or where a generator is given, it is the sequence of one, as "
        "Opacus draws it."
    )
