"""The README's picture: time and memory of a private step over the plain one, of the most measured machine; a dash
stands where nothing was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from workloads import WORKLOADS

LEGS = {
    "dpfast one-pass": ("dpfast", "#1f77b4"),
    "opacus ghost": ("Opacus ghost", "#8c8c8c"),
    "opacus hooks": ("Opacus hooks", "#b0b0b0"),
    "fastDP": ("fastDP", "#d4d4d4"),
}
SHORT = {"gpt": "GPT-like,\nT = 128", "long": "GPT-like,\nT = 1024", "mlp": "MLP", "lora": "LoRA", "cnn": "CNN"}
TOP = 3.0


def most_measured(rows: dict) -> dict[str, dict[str, dict]]:
    """{workload: {leg: row}} of the CPU with most workloads, of these one that is not told to use fewer instructions,
    and the last measured, with one thread and the allocator as it comes."""
    chosen = {
        key: legs
        for key, legs in rows.items()
        if WORKLOADS[key[1]].device != "cuda" and key[2] == 1 and "tuned" not in key[3]
    }
    if not chosen:
        return {}
    of_cpu = {cpu: [row for k, legs in chosen.items() if k[0] == cpu for row in legs.values()] for cpu, *_ in chosen}

    def rank(cpu: str) -> tuple[int, bool, str]:
        workloads = sum(key[0] == cpu and key[1] in SHORT for key in chosen)
        return workloads, not any(map(_is_imitated, of_cpu[cpu])), max(row["date"] for row in of_cpu[cpu])

    taken = max(of_cpu, key=rank)
    return {key[1]: legs for key, legs in chosen.items() if key[0] == taken and key[1] in SHORT}


def _is_imitated(row: dict) -> bool:
    """Whether oneDNN was told to use less than the processor has."""
    return f"oneDNN {row.get('instructions')}" not in row.get("used", f"oneDNN {row.get('instructions')}")


def times(row: dict, plain: dict) -> float | None:
    """The median over rounds of (step / plain step)."""
    return row.get("ratio_plain")


def tensors(row: dict, plain: dict) -> float | None:
    """The peak of a step's tensors over the plain step's."""
    return row["tensors_mb"] / plain["tensors_mb"] if "tensors_mb" in row and "tensors_mb" in plain else None


def bars(found: dict[str, dict[str, dict]], ratio: Callable[[dict, dict], float | None]) -> dict[str, dict[str, float]]:
    """{leg: {workload: its ratio to the plain step}}, of those that were measured."""
    of = {(leg, name): ratio(legs.get(leg, {}), legs.get("plain", {})) for name, legs in found.items() for leg in LEGS}
    return {leg: {name: of[leg, name] for name in found if of[leg, name] is not None} for leg in LEGS}


def picture(rows: dict, path: Path) -> None:
    found = most_measured(rows)
    if not found:
        return
    figure, all_axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    panels = ("time of a step / the plain step's", times), ("peak memory of its tensors / the plain step's", tensors)
    width = 0.8 / len(LEGS)
    for axes, (title, ratio_of) in zip(all_axes, panels, strict=True):
        for i, (leg, ratios) in enumerate(bars(found, ratio_of).items()):
            colour = LEGS[leg][1]
            for j, workload in enumerate(found):
                x = j + (i - (len(LEGS) - 1) / 2) * width
                if workload not in ratios:
                    axes.text(x, 0.04, "–", ha="center", fontsize=6)
                else:
                    ratio = ratios[workload]
                    axes.bar(x, min(ratio, TOP), width, color=colour)
                    text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
                    axes.text(x, min(ratio, TOP) + 0.04, text, ha="center", fontsize=6)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(found)), [SHORT[workload] for workload in found], fontsize=8)
        axes.set_ylim(0, TOP + 0.3)
        axes.set_title(title, fontsize=9)
    measured = bars(found, times)
    labels = [name if measured[leg] else f"{name}: not measured" for leg, (name, _) in LEGS.items()]
    patches = [Patch(color=colour, label=label) for (_, colour), label in zip(LEGS.values(), labels, strict=True)]
    figure.legend(handles=patches, fontsize=8, ncols=len(LEGS), loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
