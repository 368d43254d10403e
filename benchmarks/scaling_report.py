"""The table and the picture of one-pass clipping against T, N and width, from the rows of scaling.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rows import RESULTS, read

VARIES = {"T": "t", "N": "n", "width": "width"}
"""What varies, and a row's name for it."""


def newest(results: Path = RESULTS) -> dict[str, list[dict]]:
    """{what varies: the newest row of each of its values, in order}, of the machine and instructions measured last."""
    rows = read(results / "scaling.jsonl")
    found: dict[str, dict[int, dict]] = {}
    for row in rows:
        if (row["cpu"], row["used"]) == (rows[-1]["cpu"], rows[-1]["used"]):
            found.setdefault(row["varies"], {})[row[VARIES[row["varies"]]]] = row
    return {varies: [own[value] for value in sorted(own)] for varies, own in found.items()}


def lines(results: Path = RESULTS) -> Iterator[str]:
    """A table for each of what varies."""
    found = newest(results)
    if not found:
        yield "Nothing has been measured yet."
        return
    for varies, rows in found.items():
        one = rows[-1]
        fixed = ", ".join(f"{name} = {one[key]}" for name, key in VARIES.items() if len({r[key] for r in rows}) == 1)
        cells = {
            f"{varies} ({fixed})": [str(row[VARIES[varies]]) for row in rows],
            "time": [f"{row['ratio']:.2f}" for row in rows],
            "most memory of tensors": [f"{row['tensors']:.2f}" for row in rows],
            "plain step, ms": [f"{row['ms']['plain']:.1f}" for row in rows],
        }
        head, *body = (f"| {name} | {' | '.join(own)} |" for name, own in cells.items())
        yield from (head, "|---|" + "--:|" * len(rows), *body)
        yield ""
    where = f"{one['cpu']}, {one['instructions']} (used: {one['used']}), torch {one['torch']}, commit {one['commit']}"
    yield f"{where}, {one['rounds']} steps each."


def picture(results: Path, path: Path) -> None:
    found = newest(results)
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 3.6), layout="constrained", squeeze=False)
    for axis, (varies, rows) in zip(axes[0], found.items(), strict=True):
        values = [row[VARIES[varies]] for row in rows]
        low, high = zip(*(row["quartiles"] for row in rows), strict=True)
        axis.plot(values, [row["ratio"] for row in rows], marker="o", color="#009E73", label="time")
        axis.fill_between(values, low, high, color="#009E73", alpha=0.25)
        axis.plot(values, [row["tensors"] for row in rows], marker="s", color="#999999", label="memory of tensors")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", xlabel=varies, ylim=(0.8, None), title=f"one pass / plain step, by {varies}")
        axis.set_xticks(values, values, minor=False)
        axis.minorticks_off()
    axes[0][0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
