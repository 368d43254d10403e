"""The rows of benchmarks/results/step.jsonl as a table (docs/step.md) and a bar picture (docs/step.png).

python benchmarks/report.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from legs import LEGS
from step import RESULTS, ROOT
from workloads import WORKLOADS

Key = tuple[str, str]


def latest_rows() -> dict[Key, dict[str, dict]]:
    """{(machine, workload): {leg: its newest row}}."""
    rows: dict[Key, dict[str, dict]] = {}
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault((row["machine"], row["workload"]), {})[row["leg"]] = row
    return dict(sorted(rows.items(), key=lambda item: (item[0][0], [*WORKLOADS].index(item[0][1]))))


def markdown(rows: dict[Key, dict[str, dict]]) -> str:
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: dict[Key, dict[str, dict]]) -> Iterator[str]:
    yield "# A training step, private and plain"
    yield ""
    yield (
        "Made by `python benchmarks/report.py` from the rows that `python benchmarks/step.py` writes. All legs of a "
        "workload run in one process and take turns; a ratio is the median over rounds of (leg / plain) within a "
        "round, its quartiles beside it. On a CPU: one thread, fp32, CPU time, a C allocator that keeps its memory "
        "(for all legs alike). *Memory* is the peak of model, batch and three steps in a process of its own. *Error* "
        "is the largest relative error of a parameter's clipped gradient against an fp64 loop over samples; for "
        "dpfast it is the slack of the proven norm bound. Every private leg adds the same noise as *plain+noise*."
    )
    for (machine, workload), legs in rows.items():
        some = next(iter(legs.values()))
        yield ""
        yield f"## {WORKLOADS[workload].title}"
        yield ""
        yield f"{machine}, torch {some['torch']}, commit {some['commit']}, {some['date']}"
        yield ""
        yield "| leg | ms | / plain | quartiles | / plain+noise | memory, MB | / plain | error |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|"
        plain_peak = legs.get("plain", {}).get("peak_mb")
        for leg in LEGS:
            if leg in legs:
                yield _table_row(legs[leg], plain_peak)


def _table_row(row: dict, plain_peak: float | None) -> str:
    if "note" in row:
        return f"| {row['leg']} | {row['note']} | | | | | | {row.get('error', '')} |"
    peak = row.get("peak_mb")
    cells = [
        row["leg"],
        f"{row['ms']:.0f}",
        f"{row['ratio_plain']:.2f}",
        "–".join(f"{q:.2f}" for q in row["quartiles"]),
    ]
    cells += [f"{row['ratio_noise']:.2f}", f"{peak:.0f}" if peak else ""]
    cells += [
        f"{peak / plain_peak:.2f}" if peak and plain_peak else "",
        f"{row['error']:.1g}" if "error" in row else "",
    ]
    return "| " + " | ".join(cells) + " |"


def picture(rows: dict[Key, dict[str, dict]], path: Path) -> None:
    """Bars of the ratio to plain+noise; those that do not fit are cut off and carry their number."""
    top = 3.0
    legs = [leg for leg in LEGS if leg not in ("plain", "plain+noise")]
    figure, axes = plt.subplots(figsize=(1.5 + 2.0 * len(rows), 4), layout="constrained")
    width = 0.8 / len(legs)
    for i, leg in enumerate(legs):
        colour = plt.cm.Blues(0.5 + 0.15 * i) if leg.startswith("dpfast") else plt.cm.Greys(0.35 + 0.15 * i)
        for j, found in enumerate(rows.values()):
            ratio = found.get(leg, {}).get("ratio_noise")
            if ratio is None:
                continue
            x = j + (i - len(legs) / 2 + 0.5) * width
            axes.bar(x, min(ratio, top), width, color=colour, label=leg if j == 0 else None)
            axes.text(
                x, min(ratio, top) + 0.03, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", ha="center", fontsize=6
            )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [workload for _, workload in rows])
    axes.set_ylim(0, top + 0.25)
    axes.set_ylabel("step / plain step with noise")
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    rows = latest_rows()
    (ROOT / "docs" / "step.md").write_text(markdown(rows) + "\n![step / plain step with noise](step.png)\n")
    picture(rows, ROOT / "docs" / "step.png")
    print(markdown(rows))


if __name__ == "__main__":
    main()
