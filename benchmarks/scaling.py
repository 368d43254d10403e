"""Where each way wins: time and memory of one-pass clipping over the plain step against T, N and width, and the
measured crossover of the direct and the Gram norm beside that of ``cost.py``.

    python benchmarks/scaling.py          # a few minutes on one CPU thread; writes docs/scaling.png
    python benchmarks/scaling.py norms    # a minute: what a FLOP of the Gram norm takes beside one of the direct norm
    python benchmarks/scaling.py turns    # a minute: layers taken in turn beside the way that they would go otherwise

The second writes rows to results/norms.jsonl, of which ``cost.GRAM_FLOP`` has the median for each set of instructions,
the third to results/turns.jsonl, on which ``cost.IN_TURN_SAVES`` and ``cost.IN_TURN_CACHED`` rest;
``MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`` in front imitates a smaller processor.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rows import RESULTS, Rows, environment, processor
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from workloads import Gpt, language_losses

import dpfast
from dpfast.arithmetic import buffers, cost, ops
from dpfast.arithmetic.products import multiplier
from dpfast.factors import InTurn, OuterProduct, norms_or_unfinished, total_sq_norm
from dpfast.modes.clipped import clip_to
from dpfast.modes.clippers import ConstantFlatClipper
from dpfast.modes.in_turn import clip_in_turn
from dpfast.modes.memory_budget import size_of

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "scaling.png"
ROUNDS = 9
STEPS = {  # what varies -> its values and (N, T, width) of each
    "T": [(t, (max(1, 1024 // t), t, 128)) for t in (64, 128, 256, 512, 1024, 2048, 4096, 8192)],
    "N": [(n, (n, 128, 128)) for n in (1, 4, 16, 32)],
    "width": [(d, (8, 128, d)) for d in (64, 128, 256, 512)],
}
NORMS = [(128, 128), (256, 256), (256, 1024), (256, 8)]  # D, P
NEAR_EQUAL = [(256, 256, 128), (256, 768, 128), (256, 1024, 128), (256, 1024, 256), (768, 768, 512), (1024, 1024, 512)]
"""D, P and T at which both norms count about as many FLOPs, of layers large enough for a count to tell."""


TURNS = [  # layers, D, P, T
    *((layers, 128, 128, 48) for layers in (1, 4, 16)),
    *((layers, 256, 256, 64) for layers in (1, 2, 4, 16)),
    *((layers, 256, 1024, 128) for layers in (1, 4, 16)),
    *((layers, 512, 512, 128) for layers in (1, 4, 16)),
    *((layers, 1024, 1024, 128) for layers in (1, 4, 8, 12)),
    *((layers, 1024, 4096, 128) for layers in (1, 2, 4)),
    *((layers, 1024, 1024, 256) for layers in (1, 4)),
    *((layers, 1024, 4096, 512) for layers in (1, 2)),
]
"""From less than is worth its calls to more than caches hold; none whose gradient is less than its inputs."""


def _interleaved(calls: list[Callable[[], None]]) -> list[list[float]]:
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, own in zip(calls, seconds, strict=True):
            start = time.process_time()
            call()
            own.append(time.process_time() - start)
    return seconds


def step_ratio(n: int, t: int, d: int) -> tuple[float, float]:
    """(time, peak memory) of forward and one-pass backward over the plain ones; a block and head of 256 words."""
    torch.manual_seed(0)
    model = Gpt(256, d, 1, t, heads=4)
    batch = tuple(torch.randint(0, 256, (n, t)) for _ in range(2))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(model))

    def step(module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        language_losses(module, *batch).mean().backward()

    plain, private = _interleaved([lambda: step(model), lambda: step(wrapped)])
    ratio = statistics.median(y / x for x, y in zip(plain, private, strict=True))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    peaks = [parameters + _peak(lambda module=module: step(module)) for module in (model, wrapped)]
    return ratio, peaks[1] / peaks[0]


def _peak(call: Callable[[], None]) -> int:
    """Bytes of tensors that ``call`` holds at most, kept gradients included."""
    empty = buffers.empty

    def watched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)  # the profiler sees no other memory

    buffers.empty = watched
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            call()
    finally:
        buffers.empty = empty
    now = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def norms() -> None:
    """A row for each of NEAR_EQUAL."""
    table = Rows(RESULTS / "norms.jsonl", {**environment("cpu"), **processor()})
    for d, p, t in NEAR_EQUAL:
        (taken,), counted = _gram_over_direct(d, p, [t]), [cost.norm_flops(way, t, d, p) for way in ("gram", "direct")]
        row = table.add(
            d=d,
            p=p,
            t=t,
            multiplier=multiplier(),
            gram_over_direct=round(taken, 3),
            gram_flop=round(taken * counted[1] / counted[0], 3),
        )
        print({key: row[key] for key in ("d", "p", "t", "multiplier", "gram_over_direct", "gram_flop")}, flush=True)


def turns() -> None:
    """A row for each of TURNS, eight samples."""
    table = Rows(RESULTS / "turns.jsonl", {**environment("cpu"), **processor()})
    clipper = ConstantFlatClipper(1.0)
    for layers, d, p, t in TURNS:
        torch.manual_seed(0)
        inputs = [(torch.randn(8, t, d), torch.randn(8, t, p)) for _ in range(layers)]

        def products(inputs: list[tuple[Tensor, Tensor]] = inputs) -> list[OuterProduct]:
            return [OuterProduct.of_rows(a, b) for a, b in inputs]

        def in_turn(make: Callable[[], list[OuterProduct]] = products) -> None:
            found = InTurn(make())
            clip_in_turn(found, [], clipper, 0.0, 1.0, None)
            found.totals()

        def otherwise(make: Callable[[], list[OuterProduct]] = products) -> None:
            factors = [factor.kept() for factor in make()]
            norm = total_sq_norm(norms_or_unfinished(factors), 8, [[i] for i in range(len(factors))])
            weights = clip_to(1.0, norm, 1.0).single
            for factor in factors:
                factor.weighted_sum(weights)

        one, other = _interleaved([in_turn, otherwise])
        sizes = [size_of(factor) for factor in products()]
        row = table.add(
            layers=layers,
            d=d,
            p=p,
            t=t,
            multiplier=multiplier(),
            megabytes=round(sum(size.gradient for size in sizes) / 2**20, 1),
            saves_each=round(sizes[0].saves_in_turn / 2**20, 1),
            saves_all=round(sum(size.saves_in_turn for size in sizes) / 2**20, 1),
            taken=all(cost.in_turn(sizes)),
            in_turn_over_otherwise=round(statistics.median(x / y for x, y in zip(one, other, strict=True)), 3),
        )
        shown = ("layers", "d", "p", "t", "megabytes", "saves_each", "saves_all", "taken", "in_turn_over_otherwise")
        print({key: row[key] for key in shown}, flush=True)


def crossover(d: int, p: int) -> tuple[list[int], list[float]]:
    """(T, time of the Gram norm / time of the direct norm)."""
    positions = [t for t in (16, 32, 64, 128, 256, 512, 1024) if t * max(d, p) <= 2**19]
    return positions, _gram_over_direct(d, p, positions)


def _gram_over_direct(d: int, p: int, positions: list[int]) -> list[float]:
    ratios = []
    for t in positions:
        a, b = torch.randn(4, t, d), torch.randn(4, t, p)
        gram, direct = _interleaved(
            [lambda a=a, b=b: ops.sq_norm(a, b, way="gram"), lambda a=a, b=b: ops.sq_norm(a, b, way="direct")]
        )
        ratios.append(statistics.median(x / y for x, y in zip(gram, direct, strict=True)))
    return ratios


def main() -> None:
    torch.set_num_threads(1)
    for name, rows in (("norms", norms), ("turns", turns)):
        if name in sys.argv[1:]:
            rows()
            return
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for axis, (name, points) in zip(axes, STEPS.items(), strict=False):
        values = [value for value, _ in points]
        ratios = [step_ratio(*sizes) for _, sizes in points]
        for i, label in enumerate(("time", "peak memory")):
            axis.plot(values, [r[i] for r in ratios], marker="o", label=label)
        for value, (seconds, memory) in zip(values, ratios, strict=True):
            print(f"{name} = {value}: time {seconds:.2f}, memory {memory:.2f} of plain", flush=True)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", xlabel=name, ylim=(0.8, None), title=f"one-pass / plain against {name}")
        axis.set_xticks(values, values, minor=False)
        axis.minorticks_off()
        axis.legend()
    for i, (d, p) in enumerate(NORMS):
        positions, ratios = crossover(d, p)
        model = next(t for t in range(2, d + p) if cost.norm_way(t, d, p, torch.device("cpu")) == "direct")
        measured = next((t for t, r in zip(positions, ratios, strict=True) if r >= 1.0), None)
        taken = [cost.norm_way(t, d, p, torch.device("cpu")) for t in positions]
        print(f"D, P = {d}, {p}: Gram costs as much as direct from T = {measured}, model T = {model}; {taken}")
        axes[3].plot(positions, ratios, marker="o", color=f"C{i}", label=f"{d}×{p}")
        axes[3].axvline(model, color=f"C{i}", linestyle=":")
    axes[3].axhline(1.0, color="black", linewidth=0.8)
    axes[3].set(xscale="log", yscale="log", xlabel="T", title="Gram / direct norm (dotted: as modelled)")
    axes[3].legend(title="D×P")
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
