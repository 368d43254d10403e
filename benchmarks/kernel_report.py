"""The rows of the kernel table as tables and as a roofline picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from layers import KERNEL, LAYERS
from rows import RESULTS, read

NAMES = ("dpfast", "cuBLAS", "Opacus", "float hook", "torch")
Cell = tuple[str, str, str]  # layer, verb, contender


def newest(results: Path = RESULTS) -> dict[str, dict[Cell, dict]]:
    """{machine: {cell: its newest row}}, in the order of layers and verbs."""
    order = {layer.name: i for i, layer in enumerate(LAYERS)}
    rows = [row for row in read(results / "kernels.jsonl") if row["layer"] in order]
    machines: dict[str, dict[Cell, dict]] = {}
    for row in rows:
        machines.setdefault(row["machine"], {})[row["layer"], row["verb"], row["contender"]] = row
    verbs = [*KERNEL]

    def place(item: tuple[Cell, dict]) -> tuple[int, int]:
        (layer, verb, _), _ = item
        return order[layer], verbs.index(verb)

    return {machine: dict(sorted(cells.items(), key=place)) for machine, cells in sorted(machines.items())}


def share(row: dict | None) -> str:
    """Percent of the limit that the row reaches; the note's dash where it has no time."""
    return f"{100 * row['limit_ms'] / row['ms']:.0f} %" if row and "ms" in row else "–"


def summary(machines: dict[str, dict[Cell, dict]]) -> Iterator[str]:
    """Percent of the limit, a line a layer and a column a verb, for docs/performance.md."""
    for machine, cells in machines.items():
        some = next(iter(cells.values()))
        yield (
            f"Percent of the limit on {machine}, max(bytes / rate of a copy, FLOPs / rate of a square product), both "
            f"measured in the same run (torch {some['torch']}, Triton {some['triton']}, commit {some['commit']}):"
        )
        yield ""
        yield f"| layer (N, T, D, P) | {' | '.join(KERNEL)} |"
        yield "|---|" + "---:|" * len(KERNEL)
        for layer in dict.fromkeys(layer for layer, _, _ in cells):
            found = [cells.get((layer, verb, "dpfast")) for verb in KERNEL]
            yield (
                f"| {sizes(next(r for (name, _, _), r in cells.items() if name == layer))} | "
                + " | ".join(share(row) for row in found)
                + " |"
            )
        yield ""


def sizes(row: dict) -> str:
    factors = f" × {row['factors']}" if row["factors"] > 1 and "×" not in row["layer"] else ""
    return f"{row['layer']}{factors} ({row['N']}, {row['T']}, {row['D']}, {row['P']})"


def tables(machines: dict[str, dict[Cell, dict]]) -> Iterator[str]:
    """Every contender's milliseconds and error: docs/kernels.md."""
    yield "# The kernels on real layers"
    yield ""
    yield (
        "Made by `python benchmarks/report.py` from the rows that `make bench-gpu` writes. Milliseconds of one call: "
        "the median of CUDA graph replays timed by events, the L2 cache cleared before each. The limit is max(bytes / "
        "rate of a copy, FLOPs / rate of a square product), both measured in the same run; every input and output "
        "counts once, a Gram matrix half. In brackets: the relative error to fp64, without which no time is written. "
        "*cuBLAS* is its product with an fp32 result, and what the verb does with it; *Opacus* its sampler's einsum; "
        "*float hook* a hook that converts to fp32 and contracts; *torch* a sort and index_add_ (lookups: P rows of D)."
    )
    for machine, cells in machines.items():
        some = next(iter(cells.values()))
        yield ""
        yield f"## {machine}"
        yield ""
        yield (
            f"Driver {some['driver']}, torch {some['torch']}, Triton {some['triton']}, commit {some['commit']}, "
            f"{some['date']}"
        )
        yield ""
        yield f"| layer (N, T, D, P) | verb | limit | % | {' | '.join(NAMES)} | tile | MHz |"
        yield "|---|---|---:|---:|" + "---:|" * len(NAMES) + "---|---:|"
        for layer, verb in dict.fromkeys((layer, verb) for layer, verb, _ in cells):
            own = {name: cells.get((layer, verb, name)) for name in NAMES}
            row = next(r for r in own.values() if r)
            ours = own["dpfast"] or {}
            figures = " | ".join(_figure(own[name]) for name in NAMES)
            yield (
                f"| {sizes(row)} | {verb} | {row['limit_ms']:.3g} | {share(own['dpfast'])} | {figures} | "
                f"{ours.get('tile', '')} | {ours.get('clock_mhz') or ''} |"
            )


def _figure(row: dict | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.3g} ({row['error']:.0e})" if "ms" in row else row["note"]


def roofline(machines: dict[str, dict[Cell, dict]], path: Path) -> None:
    """FLOP/s against FLOPs per byte, a point a layer and verb, under the measured ceilings."""
    figure, axes = plt.subplots(1, len(machines), figsize=(7 * len(machines), 5), layout="constrained", squeeze=False)
    for axis, (machine, cells) in zip(axes[0], machines.items(), strict=True):
        ours = {cell: row for cell, row in cells.items() if cell[2] == "dpfast" and "ms" in row and row["flops"]}
        for i, verb in enumerate(KERNEL):
            rows = [row for (_, v, _), row in ours.items() if v == verb]
            axis.scatter(
                [row["flops"] / row["bytes"] for row in rows],
                [row["flops"] / row["ms"] / 1e9 for row in rows],
                s=24,
                color=f"C{i}",
                marker="osD^v"[i],
                label=verb,
            )
        intensities = [row["flops"] / row["bytes"] for row in ours.values()]
        grid = [min(intensities) / 2, max(intensities) * 2]
        for name, style in (("bf16", "-"), ("fp32", ":")):
            ceiling = next(iter(cells.values()))["ceilings"]
            ridge = ceiling[name] / ceiling["copy"]
            x = sorted({*grid, min(max(ridge, grid[0]), grid[1])})
            y = [min(ceiling["copy"] * i, ceiling[name]) / 1e12 for i in x]
            axis.plot(x, y, color="black", linestyle=style, linewidth=1, label=f"measured ceiling, {name}")
        axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte that must move", ylabel="TFLOP/s", title=machine)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
