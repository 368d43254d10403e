"""The table and the picture of `digits.py`."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

# Colours of Okabe and Ito, which the colour-blind can tell apart; the curves differ in dash and width too.
COLOURS = {"plain": "#999999", "Opacus hooks": "#E69F00", "Opacus ghost": "#56B4E9", "dpfast": "#009E73"}
COLOURS["dpfast, compiled"] = "#0072B2"
LINES = {"plain": (":", 1.8), "Opacus hooks": ("-", 5.0), "Opacus ghost": ("-", 2.6), "dpfast": ("--", 1.4)}
LINES["dpfast, compiled"] = (":", 1.4)

# header, key in a row, format
COLUMNS = [
    ("model", "model", "{}"),
    ("training", "leg", "{}"),
    ("test accuracy", "accuracy", "{:.3f}"),
    ("ε", "epsilon", "{:.2f}"),
    ("samples/s", "samples_per_second", "{:,.0f}"),
    ("peak memory (MB)", "memory_mb", "{:.1f}"),
    ("step / plain step", "step_ratio", "{:.2f}"),
    ("largest rel. difference", "difference", "{:.1e}"),
]


def progress_bar(description: str, unit: str, total: int) -> tqdm:
    """A bar of one line; into a log file it is printed at its beginning and its end only."""
    interval = 0.1 if sys.stderr.isatty() else float("inf")
    return tqdm(total=total, desc=f"{description:32}", unit=unit, ncols=110, mininterval=interval)


def write(rows: list[dict], settings: dict, out: Path, markdown: Path | None) -> None:
    """Prints the table; writes `demo.json` and `demo.png` into `out`, the Markdown table into `markdown`."""
    out.mkdir(parents=True, exist_ok=True)
    caption = (
        f"{settings['device']}, torch {settings['torch']}. {settings['steps']} steps on Poisson batches of "
        f"{settings['batch_size']} expected samples, σ = {settings['sigma']:.2f}, "
        f"C = {settings['max_grad_norm']:g}; ε at δ = {settings['delta']:g} by Opacus's PRV accountant. "
        f"A step is forward, backward, clipping, noise and update; the noise alone makes it "
        f"{in_plain_steps(rows, 'noise_alone_ratio')}. {of_the_compiled(rows)}"
        "Peak memory is what training adds to the "
        "process. The difference is the clipped gradient's from a one-sample-at-a-time loop in float64 "
        "(relative L2, the worst parameter)."
    )
    table = Table(title="Handwritten digits, trained privately", caption=caption, caption_justify="left")
    for position, (header, _, _) in enumerate(COLUMNS):
        table.add_column(header, justify="left" if position < 2 else "right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following["model"] != row["model"]
        table.add_row(*cells(row), style="bold" if row["leg"].startswith("dpfast") else None, end_section=last)
    Console(width=None if sys.stdout.isatty() else 130).print(table)

    text = markdown_table(rows, caption)
    print(f"\n{text}")
    if markdown:
        markdown.write_text(text, encoding="utf-8")
    results = {"settings": settings, "rows": rows}
    (out / "demo.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    draw(rows, out / "demo.png")


def in_plain_steps(rows: list[dict], key: str) -> str:
    ratios = {row["model"]: row[key] for row in rows}
    return ", ".join(f"{ratio:.2f} plain steps ({model})" for model, ratio in ratios.items())


def of_the_compiled(rows: list[dict]) -> str:
    if any(row["plain_compiled_ratio"] is None for row in rows):
        return ""
    return (
        "The compiled step runs padded to the size of its graph, and has been compiled before; torch.compile makes the "
        f"step without privacy {in_plain_steps(rows, 'plain_compiled_ratio')}. "
    )


def cells(row: dict) -> list[str]:
    return ["–" if row[key] is None else form.format(row[key]) for _, key, form in COLUMNS]


def markdown_table(rows: list[dict], caption: str) -> str:
    lines = [[header for header, _, _ in COLUMNS], ["---", "---"] + ["---:"] * (len(COLUMNS) - 2)]
    lines += [cells(row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{caption}\n"


def draw(rows: list[dict], path: Path) -> None:
    """One line of panels a model: accuracy and loss while training, then the step's time and memory."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(len(models), 4, figsize=(19, 4.4 * len(models)), layout="constrained")
    for line, model in zip(axes, models, strict=True):
        legs = {row["leg"]: row for row in rows if row["model"] == model}
        ours = legs["dpfast"]
        opacus = min(row["step_ratio"] for leg, row in legs.items() if leg.startswith("Opacus"))
        name = model[0].upper() + model[1:]
        curves(line[0], legs, "curve_accuracy", "test accuracy")
        line[0].set_title(f"{name}: {ours['accuracy']:.0%} right, trained privately")
        curves(line[1], legs, "curve_loss", "test loss")
        private = [row["curve_loss"] for leg, row in legs.items() if leg != "plain"]
        spread = max(max(losses) - min(losses) for losses in zip(*private, strict=True))
        line[1].set_title(f"The private runs differ by {spread:.0e} at most")
        bars(line[2], legs, "step_ratio", "{:.2f}", "time of a step, in plain steps")
        line[2].axvline(ours["noise_alone_ratio"], color="black", linestyle="--", linewidth=1, label="noise alone")
        line[2].legend(loc="upper right")
        compiled = legs.get("dpfast, compiled")
        also = "" if compiled is None else f", compiled {compiled['step_ratio']:.2f}"
        line[2].set_title(f"dpfast: {ours['step_ratio']:.2f} plain steps{also} (Opacus at best {opacus:.2f})")
        bars(line[3], legs, "memory_mb", "{:.1f}", "peak memory of training (MB)")
        line[3].set_title("Memory: what training adds to the process")
    axes[0][0].legend(loc="lower right")
    epsilon = max(row["epsilon"] for row in rows if row["epsilon"] is not None)
    title = f"Handwritten digits, trained with differential privacy (ε = {epsilon:.2f}) by dpfast and by Opacus"
    figure.suptitle(title, fontsize=15, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(axis, legs: dict[str, dict], key: str, label: str) -> None:
    for leg, row in legs.items():
        style, width = LINES[leg]
        axis.plot(row["curve_steps"], row[key], style, color=COLOURS[leg], linewidth=width, label=leg)
    axis.set(xlabel="step", ylabel=label)
    axis.set_ylim(0, 1 if key == "curve_accuracy" else None)
    axis.grid(alpha=0.3)


def bars(axis, legs: dict[str, dict], key: str, form: str, label: str) -> None:
    """Horizontal bars, each with its value; a value that could not be measured has no bar."""
    values = {leg: row[key] for leg, row in reversed(legs.items()) if row[key] is not None}
    drawn = axis.barh(list(values), list(values.values()), color=[COLOURS[leg] for leg in values])
    axis.bar_label(
        drawn, [form.format(value) for value in values.values()], padding=4, bbox={"color": "white", "pad": 1}
    )
    axis.margins(x=0.15)
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)
