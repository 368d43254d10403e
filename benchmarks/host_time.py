"""What a private step costs beside the arithmetic: the host's time and aten ops a tap, by stage.

    python benchmarks/host_time.py                      # every model, rows to benchmarks/results/host_time.jsonl
    python benchmarks/host_time.py toy --no-write
    python benchmarks/host_time.py --fastdp ../fast-differential-privacy

The models have the layers of large ones at widths where arithmetic costs nothing, so what is measured is Python and
torch's calls: what a GPU would wait for. A step is forward, backward and clipping, without noise or optimizer. Legs
take turns in one process on one thread, step by step; the figure is the median over rounds of CPU time, and of
(leg / plain) within a round. A tap is a module with trainable parameters. An aten op is a call that reaches torch's
dispatcher below autograd, views included. Stages are of the one-pass leg; what the forward and autograd itself cost is
what they take more than in the plain step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import legs
import torch
from rich.console import Console
from rich.table import Table
from rows import RESULTS, Rows, environment
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import Gpt, Llama, Workload, language_losses

import dpfast
from dpfast.factors import Recipe, Remembered
from dpfast.modes import before, deferred, fast_gradient_clipping, leave_sums, tapped_model

ROUNDS, WARM_UP = 60, 5
N, WORDS = 4, 100
ONE_PASS = "dpfast one-pass"


def _model(name: str, title: str, t: int, width: int, build: Callable[[int, int], nn.Module]) -> Workload:
    def tokens() -> tuple[Tensor, ...]:
        return tuple(torch.randint(0, WORDS, (N, t)) for _ in range(2))

    title = f"{title}, d={width}, T={t}, N={N}"
    return Workload(name, title, lambda: build(width, t), tokens, language_losses, N)


# The toy keeps inputs until the sums; in the others gradients of layers are kept, as at the sizes that they stand for.
MODELS = {
    w.name: w
    for w in (
        _model("toy", "Toy: 2 blocks of GPT-2's shape", 8, 32, lambda d, t: Gpt(WORDS, d, 2, t)),
        _model("gpt2", "GPT-2's layers: 12 blocks", 16, 16, lambda d, t: Gpt(WORDS, d, 12, t)),
        _model("llama-1b", "Llama 1B's layers: 16 blocks", 16, 16, lambda d, t: Llama(WORDS, d, 2 * d, 16, 4)),
    )
}


@dataclass
class Leg:
    """A step in two halves, because what a tap adds to the forward is one of the stages.

    Attributes:
        backward: of the losses' mean, and the clipping.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]

    def step(self) -> None:
        self.backward(self.forward())


def _leg(
    losses: Callable[..., Tensor], model: nn.Module, batch: tuple[Tensor, ...], after: Callable = lambda: None
) -> Leg:
    parameters = list(model.parameters())

    def forward() -> Tensor:
        for p in parameters:
            p.grad = None
        return losses(model, *batch).mean()

    def backward(loss: Tensor) -> None:
        loss.backward()
        after()

    return Leg(forward, backward)


def _legs(workload: Workload, with_fastdp: bool) -> dict[str, Leg]:
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch()

    def make(wrapped: nn.Module, after: Callable = lambda: None) -> Leg:
        return _leg(workload.losses, wrapped, batch, after)

    found = {"plain": make(copy.deepcopy(model))}
    if legs.opacus_modules:
        hooked = legs.opacus_modules.GradSampleModule(copy.deepcopy(model))
        optimizer = legs._private(legs.DPOptimizer, hooked, 0.0, N)

        def clip() -> None:
            optimizer.clip_and_accumulate()
            optimizer.zero_grad()

        found["opacus hooks"] = make(hooked, clip)
    if with_fastdp:
        theirs = copy.deepcopy(model)
        legs.build(legs.FASTDP, theirs, replace(workload, batch=lambda: batch), 0.0)
        found[legs.FASTDP] = make(theirs)
    found[ONE_PASS] = make(dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=legs.C))
    return found


# --- stages ---

_MODE = fast_gradient_clipping.GradSampleModuleFastGradientClipping
STAGES = {
    "forward: tapping": (),
    "autograd and nodes": (),
    "checks": ((tapped_model.TappedModel, "receive"),),
    "waiting for others alike": ((deferred.Deferred, "takes"), (deferred.Deferred, "_take")),
    "rules": ((tapped_model.TappedModel, "factors"),),
    "keeping": ((_MODE, "on_factor"),),
    "finish": ((_MODE, "on_finish"),),
    "norms and bounds": (
        (deferred, "Alike"),
        (Recipe, "numbers"),
        (fast_gradient_clipping, "take_norms"),
        (Remembered, "total_sq_norm"),
    ),
    "clipped sums": (
        (before.Before, "sums"),
        (before.Before, "leave"),
        (leave_sums.LeavesSums, "_leave_sums"),
        (fast_gradient_clipping, "clipped_totals"),
    ),
}
"""Which functions a stage is, without what other stages have of them. The first two are differences to plain."""


class Stages:
    """Within :meth:`watched`, what each stage takes by itself.

    Args:
        clock: what is counted; its differences go to the stage that runs.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._inside, self._since = clock, [], 0.0
        self.taken: defaultdict[str, float] = defaultdict(float)

    def _turn(self) -> None:
        now = self._clock()
        if self._inside:
            self.taken[self._inside[-1]] += now - self._since
        self._since = now

    def of(self, stage: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._inside.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._inside.pop()

        return call

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        functions = [(owner, name, stage) for stage, places in STAGES.items() for owner, name in places]
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in functions]
        for owner, name, stage in functions:
            setattr(owner, name, self.of(stage, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


class Ops(TorchDispatchMode):
    """Counts what reaches the dispatcher below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _halves(leg: Leg, clock: Callable[[], float]) -> tuple[float, float]:
    start = clock()
    loss = leg.forward()
    between = clock()
    leg.backward(loss)
    return between - start, clock() - between


def _by_stage(plain: tuple[float, float], private: tuple[float, float], inside: dict[str, float]) -> dict[str, float]:
    rest = private[1] - sum(inside.values()) - plain[1]
    return dict(zip(STAGES, (private[0] - plain[0], rest, *(inside[s] for s in [*STAGES][2:])), strict=True))


def ops(workload: Workload, steps: dict[str, Leg]) -> dict[str, tuple[float, float]]:
    """Aten ops of each leg's halves, and those of the one-pass leg's stages under "stages"."""
    found = {}
    for name, leg in steps.items():
        with Ops() as counting:
            found[name] = _halves(leg, lambda: counting.count)
    with Ops() as counting:
        stages = Stages(lambda: counting.count)
        with stages.watched():
            steps[ONE_PASS].step()
    return {**found, "stages": _by_stage(found["plain"], found[ONE_PASS], stages.taken)}


def seconds(steps: dict[str, Leg], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU time of each leg's halves, round by round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for leg in steps.values():
        for _ in range(WARM_UP):
            leg.step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, leg in steps.items():
                found[name].append(_halves(leg, time.process_time))
    finally:
        gc.enable()
    return found


def measure(workload: Workload, rounds: int = ROUNDS, with_fastdp: bool = False) -> list[dict]:
    """The rows of one model, one a leg."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = _legs(workload, with_fastdp)
        times, counts = seconds(steps, rounds), ops(workload, steps)
        stages = Stages(time.process_time)
        with stages.watched():
            for _ in range(rounds):
                steps[ONE_PASS].step()
    finally:
        torch.set_num_threads(threads)
    taps = sum(any(p.requires_grad for p in m.parameters(recurse=False)) for m in workload.build().modules())
    halves = {name: tuple(map(statistics.median, zip(*both, strict=True))) for name, both in times.items()}
    plain_ops, rows = sum(counts["plain"]), []
    for name in steps:
        both = [(sum(own), sum(plain)) for own, plain in zip(times[name], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles([own / plain for own, plain in both], n=4)
        row = {
            "model": workload.name,
            "title": workload.title,
            "leg": name,
            "taps": taps,
            "ms": 1e3 * statistics.median(own for own, _ in both),
            "ratio_plain": middle,
            "quartiles": [low, high],
            "ms_a_tap": 1e3 * statistics.median(own - plain for own, plain in both) / taps,
            "ops": sum(counts[name]),
            "ops_a_tap": (sum(counts[name]) - plain_ops) / taps,
        }
        if name == ONE_PASS:
            inside = {stage: taken / rounds for stage, taken in stages.taken.items()}
            by_time = _by_stage(halves["plain"], halves[name], defaultdict(float, inside))
            row["stages"] = {
                stage: {"ops_a_tap": counts["stages"][stage] / taps, "ms_a_tap": 1e3 * by_time[stage] / taps}
                for stage in STAGES
            }
        rows.append(row)
    return rows


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title)
    for head in ("", "ms", "/ plain", "aten ops", "more a tap", "ms more a tap"):
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        figures = (f"{row['ms']:.2f}", f"{row['ratio_plain']:.2f}", f"{row['ops']:.0f}")
        table.add_row(row["leg"], *figures, f"{row['ops_a_tap']:.1f}", f"{row['ms_a_tap']:.3f}")
        for stage, of in row.get("stages", {}).items():
            table.add_row(f"  {stage}", "", "", "", f"{of['ops_a_tap']:.1f}", f"{of['ms_a_tap']:.3f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", metavar="model", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--fastdp", type=Path, metavar="PATH", help="sources of fastDP, whose leg runs too")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    if options.fastdp:
        legs.add_fastdp(options.fastdp)
    table = Rows(RESULTS / "host_time.jsonl", environment("cpu"))
    for name in options.models or MODELS:
        rows = measure(MODELS[name], options.rounds, options.fastdp is not None)
        if not options.no_write:
            for row in rows:
                table.add(**row)
        show(MODELS[name].title, rows)


if __name__ == "__main__":
    main()
