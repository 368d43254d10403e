"""docs/scale.md: the rows of scale.py, and scale_model.py for models that are not small."""

from __future__ import annotations

from collections.abc import Iterator

from scale_model import LLAMA2, Batch, collectives, memory, numel

ON_PAPER = {"DDP": (8, 1024), "FSDP2": (8, 64, 256, 1024), "TP": (8,)}
BATCH = Batch(1, 4096, 2)
HOW = (
    "*ms* is the CPU time of all ranks together, *ratio* the median over rounds of (leg / plain in the same "
    "wrapper) within a round, its quartiles beside it. *None* is the step of one process, which each rank takes by "
    "itself: what a ratio would be without a wrapper. *Wall* is the same ratio of wall times of the slowest rank. "
    "Ranks are processes that share cores with each other and with whatever else runs, so wall times say little "
    "here. *Exposed, ms* is the time in which a collective is on its way and the rank's own thread does not run, "
    "because it waits (or another process has its core): the median over rounds of the mean over ranks, in steps "
    "of their own, empty in rows of before it was measured. *Exposed, MB* are the bytes of collectives beside which "
    "no matrix product ran between the start and the wait. On a CPU FSDP2's own "
    "collectives block, on a GPU they run beside the backward. Bytes are those that one rank puts in, MB are 10⁶. "
    "*Peak* is the most that tensors take in a forward and backward beyond what stands between steps (without "
    "gradients), *kept* what of it are the samples' factors when the sums begin, *flying* the most that is on its "
    "way to other ranks at one time: under FSDP2 the sums of two units. *Error* is the largest relative error of a "
    "parameter's gradient against an fp64 loop over samples."
)


def lines(rows: list[dict]) -> Iterator[str]:
    yield "# The private step on several ranks"
    yield ""
    yield (
        "Made by `python benchmarks/report.py` from the rows that `python benchmarks/scale.py` writes, and from "
        "`benchmarks/scale_model.py`. A step is forward, backward, clipping, noise and SGD. Under DDP and FSDP2 each "
        "rank has a batch of the size that the title says, under tensor parallel (TP) all have the same one."
    )
    yield ""
    yield HOW
    yield from _measured([row for row in rows if row["what"] == "step"])
    yield from _imbalance([row for row in rows if row["what"] == "imbalance"])
    yield from _on_paper()


def _measured(rows: list[dict]) -> Iterator[str]:
    newest: dict[tuple, dict[tuple, dict]] = {}
    for row in rows:
        place = (row["cpu"], row["instructions"], row["workload"], row["ranks"])
        newest.setdefault(place, {})[row["wrapper"], row["leg"]] = row
    for (cpu, instructions, title, ranks), legs in newest.items():
        some = next(iter(legs.values()))
        yield ""
        yield f"## {title}: {ranks} ranks"
        yield ""
        yield f"{cpu}, {instructions}, gloo, torch {some['torch']}, commit {some['commit']}, {some['date']}:"
        yield ""
        yield (
            "| wrapper | leg | ms | ratio | quartiles | wall | collectives: calls · MB | exposed, ms | "
            "exposed, MB | peak, MB | kept, MB | flying, MB | error |"
        )
        yield "|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|"
        for (wrapper, leg), row in legs.items():
            yield f"| {wrapper} | {leg} | {' | '.join(_cells(row))} |"


def _cells(row: dict) -> Iterator[str]:
    if "note" in row:
        yield from (row["note"], *[""] * 10)
        return
    yield f"{row['cpu_ms']:.1f}"
    yield f"{row['ratio_plain']:.2f}"
    yield "–".join(f"{q:.2f}" for q in row["quartiles"])
    yield f"{row['wall_ratio']:.2f}"
    yield sent(row["collectives"])
    yield f"{row['exposed_ms']:.1f}" if "exposed_ms" in row else ""
    yield _mb(sum(of["exposed"] for of in row["collectives"].values()))
    yield _mb(row["peak"])
    yield _mb(row["kept"]) if "kept" in row else ""
    yield _mb(row["in_flight"])
    yield f"{row['error']:.1g}" if "error" in row else ""


def sent(kinds: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{of['calls']} · {_mb(of['bytes'])} {kind}" for kind, of in kinds.items())


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _imbalance(rows: list[dict]) -> Iterator[str]:
    newest = {row["ranks"]: row for row in rows}
    if not newest:
        return
    yield ""
    yield "## Poisson batches dealt out, and drawn by each rank"
    yield ""
    yield (
        "A step takes as long as the largest part of its batch: that part over the mean part, the mean over steps, "
        "with 16 samples a rank in expectation; and with 1 a rank, the share of steps in which some rank has none. "
        "*Dealt out* is `PoissonBatches`, one draw for all ranks; *apart* draws on each rank by itself."
    )
    yield ""
    yield "| ranks | largest, dealt out | apart | some rank without, dealt out | apart |"
    yield "|--:|--:|--:|--:|--:|"
    for ranks, row in sorted(newest.items()):
        empty = (f"{100 * row[name] / row['steps']:.0f} %" for name in ("empty", "empty_apart"))
        yield f"| {ranks} | {row['largest']:.2f} | {row['largest_apart']:.2f} | {' | '.join(empty)} |"


def _on_paper() -> Iterator[str]:
    yield ""
    yield "## On paper: Llama 2"
    yield ""
    yield (
        "Nothing here was run: these are counts, from the shapes of [Touvron et al. "
        "2023](https://arxiv.org/abs/2307.09288) and the arithmetic of `benchmarks/scale_model.py`, which "
        "tests/test_scale.py holds to counted runs of small models of these shapes on 2 and 4 processes: collectives "
        "and bytes exactly, kept factors within 2 % (entries of 2 bytes under FSDP2 alone). All parameters are "
        "trained, one sample of 4,096 positions on each rank (TP: one on all), activations and gathered parameters of "
        "2 bytes an entry, parameters and sums of 4. Under FSDP2 each block is a unit (`reduce_dtype=torch.float32` "
        "in the plain step). *Private adds* is what crosses ranks beyond the plain step. Memory is in GB (10⁹) a "
        "rank: *parameters* and as much again for `p.grad`, *kept* factors, and the most *sums* on their way; "
        "activations that autograd keeps anyway and the optimizer's state are not in it. What is kept of a sample "
        "does not shrink with the number of ranks, but under TP."
    )
    for name, model in LLAMA2.items():
        yield ""
        yield f"### {name}: {numel(model):,} parameters"
        yield ""
        yield "| wrapper | GPUs | collectives: calls · GB | private adds, bytes | parameters | kept | sums |"
        yield "|---|--:|---|--:|--:|--:|--:|"
        for wrapper, numbers in ON_PAPER.items():
            for ranks in numbers:
                plain, private = (collectives(model, wrapper, ranks, BATCH, private=is_so) for is_so in (False, True))
                more = sum(of["bytes"] for of in private.values()) - sum(of["bytes"] for of in plain.values())
                kinds = ", ".join(f"{of['calls']:,} · {of['bytes'] / 1e9:.2f} {kind}" for kind, of in private.items())
                held = memory(model, wrapper, ranks, BATCH)
                cells = " | ".join(f"{held[what] / 1e9:.2f}" for what in ("parameters", "kept", "sums"))
                yield f"| {wrapper} | {ranks:,} | {kinds} | {more:,} | {cells} |"
