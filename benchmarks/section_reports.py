"""Sections of docs/bounds.md, docs/compiled.md, docs/layouts.md and docs/migration.md, from the rows of watch.py,
compiled.py, looks.py and opacus_ghost.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rows import RESULTS, read

LEGS = ("plain, compiled", "dpfast, compiled", "plain", "dpfast one-pass")


def compiled(results: Path = RESULTS) -> Iterator[str]:
    """A line a workload: its newest steps over the plain compiled one; then what the first step took."""
    newest: dict[str, dict[str, dict]] = {}
    for row in read(results / "compiled.jsonl"):
        newest.setdefault(row["title"], {})[row["leg"]] = row
    if not newest:
        yield "Nothing has been measured yet."
        return
    yield f"| | {' | '.join(LEGS)} | rounds | machine, torch, commit |"
    yield "|---|" + "--:|" * (len(LEGS) + 1) + "---|"
    for title, legs in newest.items():
        if timed := [legs[leg] for leg in LEGS if leg in legs]:
            cells = (f"{legs[leg]['ratio']:.2f}" if leg in legs else "–" for leg in LEGS)
            yield f"| {title} | {' | '.join(cells)} | {timed[0]['rounds']} | {_where(timed[0])} |"
    for title, legs in newest.items():
        cold, cached = (legs.get(f"first step, {how}") for how in ("cold", "from the cache"))
        if cold and cached:
            yield ""
            yield (
                f"{title}: the first step took {_seconds(cold)} with an empty cache and {_seconds(cached)} in a second "
                f"process ({_where(cold)})."
            )


def install(results: Path = RESULTS) -> Iterator[str]:
    """A line a pipeline of Opacus's and a workload, newest rows."""
    newest = {(row["mode"], row["title"]): row for row in read(results / "install.jsonl")}
    if not newest:
        yield "Nothing has been measured yet."
        return
    yield "| step of Opacus's pipeline | as it is | with `install()` | times as fast | gradients differ by | measured |"
    yield "|---|--:|--:|--:|--:|---|"
    for (mode, title), row in sorted(newest.items(), key=lambda item: item[0][0]):
        where = f"{_where(row)}, Opacus {row['opacus']}, {row['rounds']} rounds"
        if "note" in row:
            yield f"| {mode}, {title} | | | {row['note']} | {row['error']:.0e} | {where} |"
            continue
        low, high = row["quartiles"]
        times = f"{row['times']:.2f} ({low:.2f}–{high:.2f})"
        yield (
            f"| {mode}, {title} | {row['ms_as_it_is']:.0f} ms | {row['ms']:.0f} ms | {times} | {row['error']:.0e} | "
            f"{where} |"
        )


def watch(results: Path = RESULTS) -> Iterator[str]:
    """A line a workload: the share of a two-pass step with each number of threads, newest rows."""
    newest: dict[str, dict[int, dict]] = {}
    for row in read(results / "watch.jsonl"):
        newest.setdefault(row["title"], {})[row["threads"]] = row
    if not newest:
        yield "Nothing has been measured yet."
        return
    counts = sorted({threads for rows in newest.values() for threads in rows})
    names = (f"{threads} thread{'s' * (threads > 1)}" for threads in counts)
    yield f"| share of a two-pass step | {' | '.join(names)} | rounds | machine, torch, commit |"
    yield "|---|" + "--:|" * (len(counts) + 1) + "---|"
    for title, rows in newest.items():
        cells = (f"{rows[threads]['share']:.2%}" if threads in rows else "–" for threads in counts)
        row = next(iter(rows.values()))
        yield f"| {title} | {' | '.join(cells)} | {row['rounds']} | {_where(row)} |"


def looks(results: Path = RESULTS) -> Iterator[str]:
    """A line a workload and number of threads, newest rows."""
    newest = {(row["title"], row["threads"]): row for row in read(results / "looks.jsonl")}
    if not newest:
        yield "Nothing has been measured yet."
        return
    yield "| | threads | the first two looks, in steps | a later one | all, of 1,000 steps | machine, torch, commit |"
    yield "|---|--:|--:|--:|--:|---|"
    for (title, threads), row in newest.items():
        cells = f"{row['first']:.1f} | {row['later']:.1f} | {row['share']:.2%}"
        yield f"| {title} | {threads} | {cells} | {_where(row)} |"


def _where(row: dict) -> str:
    return f"{row['machine']}, torch {row['torch']}, {row['commit']}"


def _seconds(row: dict) -> str:
    return f"{row['s']:.0f} s ({row['cpu_s']:.0f} s of CPU)"
