"""The measured rows as tables in docs/ (performance.md, step.md, host.md, scale.md, kernels.md; sections of compiled.md
and migration.md), and as pictures.

python benchmarks/report.py            # write them
python benchmarks/report.py --check    # exit 1 where a table is not what the rows say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import host_report
import kernel_report
import loops_report
import matplotlib
import scale_report
import scaling_report
import section_reports
import why_report

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
    "fastDP",
    "float-then-contract",
    "dpfast materialize",
    "dpfast one-pass",
    "dpfast two-pass",
)
GRAPHED = ", graph"
ALL_LEGS = (*LEGS, *(name + GRAPHED for name in ("plain", "dpfast one-pass")))
Key = tuple[str, str, int, str]
"""Machine, workload, threads, allocator."""


def latest_rows(results: Path = RESULTS) -> dict[Key, dict[str, dict]]:
    """{machine, workload, threads, allocator: {leg: its newest row}}. Rows of a CPU that do not name the allocator are
    history where others do."""
    rows: dict[Key, dict[str, dict]] = {}
    found = read(results / "step.jsonl")
    told = {row["workload"] for row in found if "allocator" in row}
    for row in found:
        if "allocator" in row or row["workload"] not in told:
            rows.setdefault(_key(row), {})[row["leg"]] = row
    names = [*WORKLOADS]
    return dict(sorted(rows.items(), key=lambda item: (item[0][0], names.index(item[0][1]), *item[0][2:])))


def _key(row: dict) -> Key:
    machine = row["machine"]
    if "cpu" in row:
        machine = f"{row['cpu']}, {row['instructions']}"
        if row["used"] != of_all(row["instructions"]):
            machine += f" (used: {row['used']})"
    return machine, row["workload"], row.get("threads", 1), row.get("allocator", "")


def of_all(instructions: str) -> str:
    """What a row says where torch and both its libraries use all that the processor has."""
    return f"torch {instructions.replace('-', '')}, oneDNN {instructions}, MKL {instructions}"


def markdown(rows: dict[Key, dict[str, dict]]) -> str:
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: dict[Key, dict[str, dict]]) -> Iterator[str]:
    yield "# A training step, private and plain"
    yield ""
    yield (
        "Made by `python benchmarks/report.py` from the rows that `python benchmarks/step.py` writes. A ratio is the "
        "median over rounds of (leg / plain) within a round, its quartiles beside it. On a CPU: fp32, each leg in a "
        "process of its own, with the C library's allocator as it comes unless the row says *tuned*; the processes "
        "take turns. One thread is measured in CPU time, several in wall time. *Faults* are page faults a step. "
        "*Memory* is the peak of the process beyond the code of the leg, where the C allocator's unusable gaps count "
        "and differ from run to run; *tensors* is the peak of the tensors alone in a step. *Error* is the largest "
        "relative error of a parameter's clipped gradient against an fp64 loop over samples; for dpfast it is the "
        "slack of the proven norm bound. Every private leg adds the same noise as *plain+noise*. `used` says what a "
        "processor that is told by its environment to use less still may, which imitates a smaller one. On a GPU: bf16,"
        " wall time, a leg in a process with the plain ones or, in rows of 5c96e59 and before, with others; where rows "
        "are of several commits, each one's ratios are to the plain step of its own run. A step named *graph* is one "
        "CUDA graph, noise and SGD in it, and is compared with the plain step as one."
    )
    for workload in dict.fromkeys(key[1] for key in rows):
        chosen = {key: legs for key, legs in rows.items() if key[1] == workload}
        yield ""
        yield f"## {WORKLOADS[workload].title}"
        yield ""
        yield from _side_by_side(chosen)
        for (machine, _, threads, allocator), legs in chosen.items():
            some = next(iter(legs.values()))
            yield ""
            where = f", {threads} thread{'s' * (threads > 1)}, {allocator}" if allocator else ""
            commits = list(dict.fromkeys(row["commit"] for row in legs.values()))
            of = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
            yield f"{machine}{where}, torch {some['torch']}, {of}, {some['date']}:"
            yield ""
            memory = "memory, MB | / plain | tensors, MB | / plain"
            yield f"| leg | ms | / plain | quartiles | / plain+noise | faults | {memory} | error |"
            yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
            for leg in ALL_LEGS:
                if leg in legs:
                    yield _table_row(legs[leg], legs.get("plain", {}))


def _side_by_side(chosen: dict[Key, dict[str, dict]]) -> Iterator[str]:
    """A workload's ratios to the plain step, a column for each machine, number of threads and allocator."""
    if len(chosen) < 2:
        return
    heads = [f"{machine}; {threads} thr.; {allocator}" for machine, _, threads, allocator in chosen]
    yield f"| / plain | {' | '.join(heads)} |"
    yield "|---|" + "--:|" * len(heads)
    for leg in ALL_LEGS:
        if any(leg in legs for legs in chosen.values()):
            yield f"| {leg} | {' | '.join(_ratio(legs.get(leg), 'ratio_plain') for legs in chosen.values())} |"


def _table_row(row: dict, plain: dict) -> str:
    if "note" in row:
        return f"| {row['leg']} | {row['note']} | | | | | | | | | {row.get('error', '')} |"
    cells = [
        row["leg"],
        f"{row['ms']:.0f}",
        f"{row['ratio_plain']:.2f}",
        "–".join(f"{q:.2f}" for q in row["quartiles"]),
        f"{row['ratio_noise']:.2f}",
        f"{row['faults']:,}" if "faults" in row else "",
    ]
    for peak in ("peak_mb", "tensors_mb"):
        cells.append(f"{row[peak]:.0f}" if peak in row else "")
        cells.append(f"{row[peak] / plain[peak]:.2f}" if peak in row and peak in plain else "")
    cells.append(f"{row['error']:.1g}" if "error" in row else "")
    return "| " + " | ".join(cells) + " |"


def picture(rows: dict[Key, dict[str, dict]], path: Path) -> None:
    """Bars of the ratio to plain+noise; those that do not fit are cut off and carry their number."""
    top = 3.0
    rows = {key: legs for key, legs in rows.items() if "tuned" not in key[3]}
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
    labels = [f"{workload}\n{threads} thr." for _, workload, threads, _ in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(0, top + 0.25)
    axes.set_ylabel("step / plain step with noise")
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


SUMMARISED = {
    "plain+noise": "plain + noise",
    "dpfast one-pass": "dpfast",
    "opacus hooks": "Opacus hooks",
    "opacus ghost": "Opacus ghost",
    "fastDP": "fastDP",
}


ON_A_GPU = {**SUMMARISED, "dpfast one-pass" + GRAPHED: "dpfast, both as one CUDA graph"}


def summary_of_steps(rows: dict[Key, dict[str, dict]], cuda: bool) -> Iterator[str]:
    """For each machine, a line a workload: the private step over the plain one. On a CPU with the allocator as it
    comes; several threads first, one in brackets."""
    chosen = {key: legs for key, legs in rows.items() if (WORKLOADS[key[1]].device == "cuda") == cuda}
    chosen = {key: legs for key, legs in chosen.items() if "tuned" not in key[3]}
    summarised = ON_A_GPU if cuda else SUMMARISED
    for machine in dict.fromkeys(key[0] for key in chosen):
        own = {key[1:]: legs for key, legs in chosen.items() if key[0] == machine}
        numbers = sorted({threads for _, threads, _ in own}, reverse=True)
        counts = [f"{n} thread{'s' * (n > 1)}" for n in numbers]
        told = "" if cuda else ", " + counts[0] + "".join(f" ({count})" for count in counts[1:])
        yield f"| {machine}{told} | {' | '.join(summarised.values())} |"
        yield "|---|" + "---:|" * len(summarised)
        for workload in dict.fromkeys(workload for workload, _, _ in own):
            by_threads = {threads: legs for (name, threads, _), legs in own.items() if name == workload}
            cells = (_ratios([by_threads.get(n, {}).get(leg) for n in numbers]) for leg in summarised)
            yield f"| {WORKLOADS[workload].title} | {' | '.join(cells)} |"
        yield ""


def _ratios(rows: list[dict | None]) -> str:
    """The first, the others in brackets."""
    first, *others = (_ratio(row, "ratio_plain") for row in rows)
    return f"{first} ({', '.join(others)})" if others and set(others) | {first} != {"–"} else first


def _ratio(row: dict | None, of: str) -> str:
    if row is None:
        return "–"
    if of not in row:
        return row["note"]
    return f"{row[of]:.2f}" if row[of] < 10 else f"{row[of]:.0f}"


def summary_of_gpu(results: Path, rows: dict[Key, dict[str, dict]]) -> Iterator[str]:
    machines = kernel_report.newest(results)
    if machines:
        yield from kernel_report.summary(machines)
        yield "[The kernels](kernels.md) has every contender, error and tile."
        yield ""
        yield "![Roofline](roofline.png)"
        yield ""
    steps = list(summary_of_steps(rows, cuda=True))
    yield from steps
    if not machines and not steps:
        yield "On a GPU nothing has been measured yet; `make bench-gpu` does it."


def medium(rows: list[dict]) -> Iterator[str]:
    """Of other people's models a line each, newest rows: private steps over the plain one, and over one with noise."""
    yield "# The step of other people's models"
    yield ""
    yield (
        "Made by `python benchmarks/report.py` from the rows that `python benchmarks/medium.py` writes: fp32, one "
        "thread, CPU time, measured as in [step.md](step.md). With few samples and many parameters the noise is a good "
        "part of a private step, so there are two ratios: to the plain step, and in brackets to the plain step with "
        "noise. *Error* is dpfast's largest relative error of a parameter's clipped gradient against an fp64 loop over "
        "samples."
    )
    newest: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        newest.setdefault((_key(row)[0], row["title"]), {})[row["leg"]] = row
    for machine in dict.fromkeys(machine for machine, _ in newest):
        yield ""
        yield f"{machine}:"
        yield ""
        yield "| model | plain, ms | plain + noise | Opacus hooks | dpfast | error | commit, rounds |"
        yield "|---|--:|--:|--:|--:|--:|---|"
        for title, legs in ((title, legs) for (where, title), legs in newest.items() if where == machine):
            plain, ours = legs["plain"], legs["dpfast one-pass"]
            both = [_ratio_and_with_noise(legs.get(leg)) for leg in ("opacus hooks", "dpfast one-pass")]
            cells = [title, f"{plain['ms']:.0f}", _ratio(legs.get("plain+noise"), "ratio_plain"), *both]
            cells += [f"{ours['error']:.1g}" if "error" in ours else "", f"{plain['commit']}, {plain['rounds']}"]
            yield f"| {' | '.join(cells)} |"


def _ratio_and_with_noise(row: dict | None) -> str:
    if row is None or "note" in row:
        return _ratio(row, "ratio_plain")
    return f"{_ratio(row, 'ratio_plain')} ({_ratio(row, 'ratio_noise')})"


def scale_page(results: Path = RESULTS) -> str:
    return "\n".join(scale_report.lines(read(results / "scale.jsonl"))) + "\n"


def documents(results: Path = RESULTS, root: Path = ROOT) -> dict[Path, str]:
    """{file: what it must hold}; of a page that people write, what stands between its markers is replaced."""
    rows = latest_rows(results)
    sections = {
        "performance.md": {
            "steps": summary_of_steps(rows, cuda=False),
            "scaling": scaling_report.lines(results),
            "gpu": summary_of_gpu(results, rows),
        },
        "bounds.md": {"watch": section_reports.watch(results)},
        "compiled.md": {"compiled": section_reports.compiled(results)},
        "layouts.md": {"looks": section_reports.looks(results)},
        "migration.md": {"install": section_reports.install(results)},
    }
    made = {}
    for page, own in sections.items():
        made[root / "docs" / page] = (root / "docs" / page).read_text()
        for name, lines in own.items():
            before, rest = made[root / "docs" / page].split(f"<!-- {name}: made by benchmarks/report.py -->\n")
            _, after = rest.split(f"<!-- /{name} -->")
            text = "\n".join(lines).strip()
            made[root / "docs" / page] = (
                f"{before}<!-- {name}: made by benchmarks/report.py -->\n{text}\n<!-- /{name} -->{after}"
            )
    cores = "".join(f"{line}\n" for line in loops_report.lines(results))
    made[root / "docs" / "step.md"] = f"{markdown(rows)}{cores}\n![step / plain step with noise](step.png)\n"
    if models := host_report.newest(results):
        made[root / "docs" / "host.md"] = "\n".join(host_report.lines(models)) + "\n"
    if other := read(results / "medium.jsonl"):
        made[root / "docs" / "medium.md"] = "\n".join(medium(other)) + "\n"
    made[root / "docs" / "scale.md"] = scale_page(results)
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
    why_report.picture(latest_rows(), ROOT / "docs" / "why.png")
    scaling_report.picture(RESULTS, ROOT / "docs" / "scaling.png")
    if machines := kernel_report.newest():
        kernel_report.roofline(machines, ROOT / "docs" / "roofline.png")


if __name__ == "__main__":
    main()
