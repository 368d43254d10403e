"""The measured rows as the README's tables, docs/step.md and docs/kernels.md, and as pictures.

python benchmarks/report.py            # write them
python benchmarks/report.py --check    # exit 1 where a table is not what the rows say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import kernel_report
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rows import RESULTS, ROOT, read
from workloads import WORKLOADS

# In the order of the tables. Not taken from `legs`, which has those of Opacus only where Opacus is installed.
LEGS = (
    "plain",
    "plain+noise",
    "opacus hooks",
    "opacus ghost",
    "float-then-contract",
    "dpfast materialize",
    "dpfast one-pass",
    "dpfast two-pass",
)
Key = tuple[str, str]


def latest_rows(results: Path = RESULTS) -> dict[Key, dict[str, dict]]:
    """{(machine, workload): {leg: its newest row}}."""
    rows: dict[Key, dict[str, dict]] = {}
    for row in read(results / "step.jsonl"):
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
        "round, its quartiles beside it. On a CPU: one thread, fp32, CPU time, rounds from four processes, a C "
        "allocator that keeps its memory (for all legs alike). *Memory* is the peak of model, batch and three steps "
        "in a process of its own, where the C allocator's unusable gaps count and differ from run to run; *tensors* "
        "is the peak of the tensors alone in a step. *Error* is the largest relative error of a parameter's clipped "
        "gradient against an fp64 loop over samples; for dpfast it is the slack of the proven norm bound. Every "
        "private leg adds the same noise as *plain+noise*."
    )
    for (machine, workload), legs in rows.items():
        some = next(iter(legs.values()))
        yield ""
        yield f"## {WORKLOADS[workload].title}"
        yield ""
        yield f"{machine}, torch {some['torch']}, commit {some['commit']}, {some['date']}"
        yield ""
        memory = "memory, MB | / plain | tensors, MB | / plain"
        yield f"| leg | ms | / plain | quartiles | / plain+noise | {memory} | error |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
        for leg in LEGS:
            if leg in legs:
                yield _table_row(legs[leg], legs.get("plain", {}))


def _table_row(row: dict, plain: dict) -> str:
    if "note" in row:
        return f"| {row['leg']} | {row['note']} | | | | | | | | {row.get('error', '')} |"
    cells = [
        row["leg"],
        f"{row['ms']:.0f}",
        f"{row['ratio_plain']:.2f}",
        "–".join(f"{q:.2f}" for q in row["quartiles"]),
    ]
    cells.append(f"{row['ratio_noise']:.2f}")
    for peak in ("peak_mb", "tensors_mb"):
        cells.append(f"{row[peak]:.0f}" if peak in row else "")
        cells.append(f"{row[peak] / plain[peak]:.2f}" if peak in row and peak in plain else "")
    cells.append(f"{row['error']:.1g}" if "error" in row else "")
    return "| " + " | ".join(cells) + " |"


def picture(rows: dict[Key, dict[str, dict]], path: Path) -> None:
    """Bars of the ratio to plain+noise; those that do not fit are cut off and carry their number."""
    top = 3.0
    legs = [leg for leg in LEGS if leg not in ("plain", "plain+noise")]
    figure, axes = plt.subplots(figsize=(1.5 + 2.0 * len(rows), 4), layout="constrained")
    width = 0.8 / len(legs)
    for i, leg in enumerate(legs):
        mine = leg.startswith("dpfast")
        place = [other for other in legs if other.startswith("dpfast") == mine].index(leg)
        colour = (plt.cm.Blues if mine else plt.cm.Greys)(0.35 + 0.25 * place)
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


IN_README = {"dpfast one-pass": "dpfast, one pass", "opacus hooks": "Opacus hooks", "opacus ghost": "Opacus ghost"}


def readme_steps(rows: dict[Key, dict[str, dict]], cuda: bool) -> Iterator[str]:
    """A line a workload of the device: the private step over the plain one with the same noise."""
    chosen = {key: legs for key, legs in rows.items() if (WORKLOADS[key[1]].device == "cuda") == cuda}
    for machine in dict.fromkeys(machine for machine, _ in chosen):
        yield f"| {machine} | {' | '.join(IN_README.values())} |"
        yield "|---|" + "---:|" * len(IN_README)
        for (owner, workload), legs in chosen.items():
            if owner == machine:
                cells = (_ratio(legs.get(leg)) for leg in IN_README)
                yield f"| {WORKLOADS[workload].title} | {' | '.join(cells)} |"
        yield ""


def _ratio(row: dict | None) -> str:
    if row is None:
        return "–"
    if "ratio_noise" not in row:
        return row["note"]
    return f"{row['ratio_noise']:.2f}" if row["ratio_noise"] < 10 else f"{row['ratio_noise']:.0f}"


def readme_gpu(results: Path, rows: dict[Key, dict[str, dict]]) -> Iterator[str]:
    machines = kernel_report.newest(results)
    if machines:
        yield from kernel_report.summary(machines)
        yield "[docs/kernels.md](docs/kernels.md) has every contender, error and tile."
        yield ""
        yield "![Roofline](docs/roofline.png)"
        yield ""
    steps = list(readme_steps(rows, cuda=True))
    yield from steps
    if not machines and not steps:
        yield "On a GPU nothing has been measured yet; `make bench-gpu` does it."


def documents(results: Path = RESULTS, root: Path = ROOT) -> dict[Path, str]:
    """{file: what it must hold}; of the README, what stands between its markers is replaced."""
    rows, readme = latest_rows(results), (root / "README.md").read_text()
    for name, lines in (("steps", readme_steps(rows, cuda=False)), ("gpu", readme_gpu(results, rows))):
        before, rest = readme.split(f"<!-- {name}: made by benchmarks/report.py -->\n")
        _, after = rest.split(f"<!-- /{name} -->")
        text = "\n".join(lines).strip()
        readme = f"{before}<!-- {name}: made by benchmarks/report.py -->\n{text}\n<!-- /{name} -->{after}"
    made = {root / "README.md": readme}
    made[root / "docs" / "step.md"] = markdown(rows) + "\n![step / plain step with noise](step.png)\n"
    if machines := kernel_report.newest(results):
        made[root / "docs" / "kernels.md"] = "\n".join(kernel_report.tables(machines)) + "\n"
    return made


def stale(results: Path = RESULTS, root: Path = ROOT) -> list[Path]:
    return [path for path, text in documents(results, root).items() if not path.exists() or path.read_text() != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        wrong = stale()
        sys.exit(f"stale, run benchmarks/report.py: {', '.join(map(str, wrong))}" if wrong else 0)
    for path, text in documents().items():
        path.write_text(text)
    picture(latest_rows(), ROOT / "docs" / "step.png")
    if machines := kernel_report.newest():
        kernel_report.roofline(machines, ROOT / "docs" / "roofline.png")


if __name__ == "__main__":
    main()
