"""The rows of `host_time.py` as docs/host.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rows import RESULTS, read


def newest(results: Path = RESULTS) -> dict[tuple[str, str], dict[str, dict]]:
    """{(machine, model): {leg: its newest row}}."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for row in read(results / "host_time.jsonl"):
        found.setdefault((row["machine"], row["model"]), {})[row["leg"]] = row
    return found


def lines(models: dict[tuple[str, str], dict[str, dict]]) -> Iterator[str]:
    yield "# The host's time"
    yield ""
    yield (
        "What a step takes where arithmetic costs nothing: Python and torch's calls. Made by `python "
        "benchmarks/report.py` from the rows that `python benchmarks/host_time.py` writes. The models have the layers "
        "of large ones at tiny widths. A step is forward, backward and clipping, without noise or optimizer; CPU time, "
        "one thread, fp32, legs in turns in one process; *ratio* is the median over rounds of (leg / plain), its "
        "quartiles beside it. A *tap* is a module with trainable parameters; *ops* are aten calls below autograd, "
        "views included. *More* is beyond the plain step. Stages are those of the one-pass step, each without what "
        "others have of it; autograd computes no sums of weight gradients there, so its own may be negative."
    )
    for (machine, _), legs in models.items():
        some = next(iter(legs.values()))
        yield ""
        yield f"## {some['title']}"
        yield ""
        yield f"{some['taps']} taps. {machine}, torch {some['torch']}, commit {some['commit']}, {some['date']}:"
        yield ""
        yield "| leg | ms | ratio | quartiles | ops | more ops a tap | more ms a tap |"
        yield "|---|--:|--:|--:|--:|--:|--:|"
        for row in legs.values():
            quartiles = "–".join(f"{q:.2f}" for q in row["quartiles"])
            step = f"{row['leg']} | {row['ms']:.2f} | {row['ratio_plain']:.2f} | {quartiles}"
            yield f"| {step} | {row['ops']:.0f} | {row['ops_a_tap']:.1f} | {row['ms_a_tap']:.3f} |"
        for row in legs.values():
            if "stages" in row:
                yield ""
                yield "| stage | more ops a tap | more ms a tap |"
                yield "|---|--:|--:|"
                for stage, of in row["stages"].items():
                    yield f"| {stage} | {of['ops_a_tap']:.1f} | {of['ms_a_tap']:.3f} |"
