"""The private step over the plain step in the same wrapper of torch.distributed, on several processes of this CPU.

    python benchmarks/scale.py [DDP FSDP2 TP] [--ranks 2 4] [--rounds 12] [--no-write]

Each rank is a process with one thread (gloo). Legs take turns in the same processes, round after round; a step's time
is the CPU time of all ranks together, because ranks that share cores wait for each other, and the wall time stands
beside it. Before anything is timed, gradients without noise are compared with a loop over samples in fp64.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import scale_legs
import torch
import torch.distributed as dist
import workloads
from collectives import counted
from legs import C
from memory import peak_of_tensors
from rows import RESULTS, Rows, environment, processor, reason
from scale_legs import LEGS, Leg, batch_of
from torch import Tensor
from workloads import Llama, Workload, gpt, language_losses

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.distributed import PoissonBatches, SharedSecret
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

ROUNDS = 12
WRAPPERS = ("none", "DDP", "FSDP2", "TP")
WATCHED = 5  # rounds in which it is watched what is on its way, which takes time itself
CHECKED = 2  # samples of each rank that go through the loop in fp64
TOLERANCE = {"FSDP2, bf16": 0.05}  # else 1e-3, as of step.py: dpfast's norms are upper ends
SMALL = (
    gpt("small-gpt", n=3, t=40, d=48, blocks=2, vocabulary=6001, check=3),
    Workload(
        "small-llama",
        "Llama-like, d=64, 3 blocks, T=8, N=2",
        lambda: Llama(61, 64, 172, 3, 4),
        lambda: tuple(torch.randint(61, (2, 8)) for _ in range(2)),
        language_losses,
        2,
    ),
)
"""Counted in the tests."""
OF_FEW = gpt("gpt-4", n=4, t=128, d=256, blocks=4, vocabulary=1000, check=4)
WORKLOADS = {workload.name: workload for workload in (workloads.WORKLOADS["gpt"], OF_FEW, *SMALL)}
SECONDS = 3600  # after which ranks are ended


# --- one rank ---


def measure(wrapper: str, workload: Workload, rounds: int, chosen: list[str]) -> list[dict[str, Any]]:
    """A row for each of the chosen legs that the wrapper has, or for all of them; on every rank alike."""
    rows: dict[str, dict[str, Any]] = {}
    legs: dict[str, Leg] = {}
    batch = batch_of(wrapper, workload)
    for name in [name for name in LEGS[wrapper] if not chosen or name in chosen]:
        row = rows[name] = {"workload": workload.title, "wrapper": wrapper, "leg": name}
        try:
            if not name.startswith("plain"):
                row["error"] = _error(wrapper, name, workload)
                if not row["error"] <= TOLERANCE.get(wrapper, 1e-3):
                    row["note"] = "wrong gradient: not timed"
                    continue
            leg = LEGS[wrapper][name](workload, 1.0)
            for _ in range(2):  # DDP makes its buckets anew behind the first
                leg.step(*batch)
            row.update(_sends(leg, batch), **_holds(leg, batch))
            legs[name] = leg
        except Exception as error:  # alike on all ranks, or the others end when their time is over
            row["note"] = reason(error)
    for name, row in _timed(legs, batch, rounds).items() if rounds else ():
        rows[name].update(row)
    for name, exposed in _exposed(legs, batch, min(rounds, WATCHED)).items():
        rows[name]["exposed_ms"] = exposed
    return list(rows.values())


def _error(wrapper: str, name: str, workload: Workload) -> float:
    """The largest relative error of a parameter's gradient."""

    def few() -> tuple[Tensor, ...]:
        return tuple(x[:CHECKED] for x in workload.batch())

    checked = replace(workload, batch=few)
    batch, leg = batch_of(wrapper, checked), LEGS[wrapper][name](checked, 0.0)
    leg.step(*batch)
    samples = loop_over_samples(
        scale_legs.model_of(wrapper, workload), lambda model, *b: workload.losses(model, *b).mean(), *batch
    )
    alone = wrapper in ("none", "TP")
    worst, ranks = 0.0, 1 if alone else dist.get_world_size()
    exact = clipped_sum(samples, C).values()
    for p, g in zip(leg.model.parameters(), exact, strict=True):
        if not alone:
            dist.all_reduce(g)
        worst = max(worst, relative_error(_whole(p.grad), g / (ranks * CHECKED)))
    return worst


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _sends(leg: Leg, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    found = counted(lambda: leg.step(*batch))
    return {"collectives": found.table(), "in_flight": found.in_flight}


def _holds(leg: Leg, batch: tuple[Tensor, ...]) -> dict[str, int]:
    """Bytes beyond what stands between steps: at most, and of them what dpfast keeps of the samples until the sums."""
    leg.optimizer.zero_grad(set_to_none=True)
    kept: list[int] = []
    with _kept(kept.append):
        leg.backward(*batch)
    leg.optimizer.zero_grad(set_to_none=True)
    found = {"peak": peak_of_tensors(lambda: leg.backward(*batch), ())}
    return {**found, "kept": kept[0]} if kept else found


def _kept(tell: Callable[[int], None]) -> Any:
    """Tells the bytes of all factors at the end of a one-pass backward, without what is (N,) long."""
    finish = GradSampleModuleFastGradientClipping.on_finish

    def on_finish(self: Any, step: Any) -> None:
        tensors = {(x.data_ptr(), x.shape): x.nbytes for x in _tensors([*step.gathered.values()]) if x.dim() > 1}
        if step.deferred is None:  # else, without a wrapper, layers that are alike wait elsewhere
            tell(sum(tensors.values()))
        finish(self, step)

    return mock.patch.object(GradSampleModuleFastGradientClipping, "on_finish", on_finish)


def _tensors(of: Any) -> Iterator[Tensor]:
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, (list, tuple)):
        for one in of:
            yield from _tensors(one)
    elif type(of).__module__.startswith("dpfast"):
        yield from _tensors(list(vars(of).values()))


def _timed(legs: dict[str, Leg], batch: tuple[Tensor, ...], rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds a step: "cpu_ms" of all ranks together, "wall_ms" of the slowest; the ratios are medians over rounds
    of (leg / plain) within a round."""
    taken: dict[str, list[list[float]]] = {name: [] for name in legs}
    gc.disable()
    for i in range(rounds + 1):
        for name in legs if i % 2 else reversed(legs):
            dist.barrier()
            start = (time.process_time(), time.perf_counter())
            legs[name].step(*batch)
            end = (time.process_time(), time.perf_counter())
            taken[name].append([1e3 * (b - a) for a, b in zip(start, end, strict=True)])
        gc.collect()
    gc.enable()
    own = torch.tensor([taken[name][1:] for name in legs], dtype=torch.float64)  # the first round warms up
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    times = torch.stack(every)  # (ranks, legs, rounds, 2)
    cpu, wall = times[..., 0].sum(0), times[..., 1].amax(0)
    rows, plain = {}, list(legs).index("plain")
    for i, name in enumerate(legs):
        low, ratio, high = statistics.quantiles((cpu[i] / cpu[plain]).tolist(), n=4)
        rows[name] = {
            "cpu_ms": round(float(cpu[i].median()), 3),
            "ratio_plain": round(ratio, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "wall_ms": round(float(wall[i].median()), 3),
            "wall_ratio": round(float((wall[i] / wall[plain]).median()), 4),
            "rounds": rounds,
        }
    return rows


def _exposed(legs: dict[str, Leg], batch: tuple[Tensor, ...], rounds: int) -> dict[str, float]:
    """Milliseconds of a step in which a collective is on its way and the rank's thread does not run: the median over
    rounds of the mean over ranks."""
    taken = torch.zeros(rounds, len(legs), dtype=torch.float64)
    for of_round in taken:
        for i, leg in enumerate(legs.values()):
            dist.barrier()
            of_round[i] = 1e3 * counted(partial(leg.step, *batch)).exposed
    if rounds:
        dist.all_reduce(taken)
    medians = (taken / dist.get_world_size()).median(0).values.tolist() if rounds else []
    return {name: round(ms, 3) for name, ms in zip(legs, medians, strict=False)}


def rank_main(rank: int, ranks: int, store: str, names: str, wrappers: str, legs: str, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    found = []
    for name in names.split(";"):
        for wrapper in wrappers.split(";"):
            found += measure(wrapper, WORKLOADS[name], rounds, [leg for leg in legs.split(";") if leg])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


# --- all of them ---


def on_ranks(
    ranks: int, names: Iterable[str], wrappers: Iterable[str], rounds: int, legs: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """What the first rank has measured: of all legs, or of these. RuntimeError with a rank's last words where one
    fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        told = [str(ranks), f"{folder}/store", ";".join(names), ";".join(wrappers), ";".join(legs), str(rounds)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), *told],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(ranks)
        ]
        end = time.monotonic() + SECONDS
        try:
            said = [process.communicate(timeout=max(1.0, end - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode != 0:
            raise RuntimeError(errors[-3000:])
    found: list[dict[str, Any]] = json.loads(said[0][0].splitlines()[-1])
    return found


def imbalance(ranks: int, each: int = 16, steps: int = 400) -> dict[str, Any]:
    """Samples a rank and step, ``each`` in expectation: of one draw dealt out, and of ranks that draw by themselves.

    Returns:
        "largest", "largest_apart": the mean over steps of the largest part over the mean part, which is what a step
        waits for. "empty", "empty_apart": steps in which some rank has none, of a 16th as many samples.
    """

    def parts(rate: float, apart: bool) -> Tensor:
        n = 256 * ranks
        if apart:
            drawn = torch.rand(steps, ranks, n // ranks, generator=torch.Generator().manual_seed(0)) < rate
            return drawn.sum(2).double()
        secret = SharedSecret(bytes(32))
        batches = [PoissonBatches(n, rate, secret, rank=rank, ranks=ranks) for rank in range(ranks)]
        return torch.tensor([[len(b.batch(step)) for b in batches] for step in range(steps)]).double()

    found: dict[str, Any] = {"ranks": ranks, "expected": each, "steps": steps}
    for name, apart in (("", False), ("_apart", True)):
        many, few = parts(each / 256, apart), parts(each / 256 / 16, apart)
        found["largest" + name] = round(float((many.amax(1) * ranks / many.sum(1)).mean()), 4)
        found["empty" + name] = int((few == 0).any(1).sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("wrappers", nargs="*", metavar="wrapper", help=", ".join(LEGS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--workload", default="gpt", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    here = {**environment("cpu"), **processor()}
    table = Rows(RESULTS / "scale.jsonl", here)
    for ranks in options.ranks:
        rows = [{"what": "imbalance", **imbalance(ranks)}]
        for row in on_ranks(ranks, [options.workload], options.wrappers or WRAPPERS, options.rounds):
            rows.append({"what": "step", "ranks": ranks, **row})
        for row in rows:
            print(json.dumps(row), flush=True)
            if not options.no_write:
                table.add(**row)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        own, number, *what, turns = sys.argv[2:]
        rank_main(int(own), int(number), *what, int(turns))
    else:
        main()
