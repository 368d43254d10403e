"""Where each way wins: time and memory of one-pass clipping over the plain step against T, N and width, and what the
ways to a norm cost beside what ``cost.py`` reckons.

    python benchmarks/scaling.py          # ten minutes: steps by T, N and width, one thread
    python benchmarks/scaling.py norms    # a minute: what a FLOP of the Gram norm takes beside one of the direct norm
    python benchmarks/scaling.py turns    # a minute: layers taken in turn beside the way that they would go otherwise

The first writes rows to results/scaling.jsonl, of which report.py makes docs/scaling.png and a table; the second to
results/norms.jsonl, of which ``cost.GRAM_FLOP`` has the median for each set of instructions; the third to
results/turns.jsonl, on which ``cost.IN_TURN_SAVES`` and ``cost.IN_TURN_CACHED`` rest.
``MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`` in front imitates a smaller processor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from in_turns import AS_IT_IS, Build, Turns, allocator_name
from rows import RESULTS, Rows, environment, processor
from torch import Tensor
from workloads import Gpt, language_losses

import dpfast
from dpfast.arithmetic import cost, ops
from dpfast.arithmetic.products import multiplier
from dpfast.factors import InTurn, OuterProduct, norms_or_unfinished, total_sq_norm
from dpfast.modes.clipped import clip_to
from dpfast.modes.clippers import ConstantFlatClipper
from dpfast.modes.in_turn import clip_in_turn
from dpfast.modes.memory_budget import size_of

ROUNDS = 9
GENERATIONS, WARM_UP, TURNS_EACH = 3, 2, 12
STEPS_A_TURN = 5  # as in a training one follows the other: the caches hold a step's code. The first ones look at models
PLAIN, ONE_PASS = "plain", "dpfast one-pass"
STEPS = {  # what varies -> (N, T, width) of its values
    "T": [(max(1, 1024 // t), t, 128) for t in (64, 128, 256, 512, 1024, 2048, 4096, 8192)],
    "N": [(n, 128, 128) for n in (1, 4, 16, 32)],
    "width": [(8, 128, d) for d in (64, 128, 256, 512)],
}
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


def steps() -> None:
    """A row for each of STEPS: forward and backward, without noise and optimizer, on one thread."""
    where = {**environment("cpu"), **processor(), "allocator": allocator_name(AS_IT_IS)}
    table = Rows(RESULTS / "scaling.jsonl", where)
    for varies, points in STEPS.items():
        for n, t, width in points:
            row = table.add(varies=varies, n=n, t=t, width=width, **compare_steps(n, t, width))
            print({key: row[key] for key in ("varies", "n", "t", "width", "ratio", "quartiles", "tensors")}, flush=True)


def compare_steps(n: int, t: int, width: int) -> dict[str, object]:
    """One-pass clipping over the plain step, of a block and a head of 256 words, each in processes of its own.

    Returns:
        "ms" of both by CPU time, the median "ratio" of turns that followed each other and its "quartiles", and the
        ratio of the most memory that "tensors" take.
    """
    builds = {leg: (_tiny, _builder(leg, n, t, width)) for leg in (PLAIN, ONE_PASS)}
    seconds: dict[str, list[float]] = {leg: [] for leg in builds}
    for _ in range(GENERATIONS):
        turns = Turns(builds, 1, AS_IT_IS)
        for i in range(WARM_UP + TURNS_EACH):
            for leg, own in seconds.items():
                taken = turns.ask(leg, "step")["cpu"]
                if i >= WARM_UP:
                    own.append(taken)
        tensors = [turns.ask(leg, "tensors")["tensors_mb"] for leg in builds]
        turns.close()
    ratios = [ours / plain for plain, ours in zip(*seconds.values(), strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "ms": {leg: round(1e3 * statistics.median(own) / STEPS_A_TURN, 2) for leg, own in seconds.items()},
        "ratio": round(ratio, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(ratios) * STEPS_A_TURN,
        "tensors": round(tensors[1] / tensors[0], 3),
    }


def _builder(leg: str, n: int, t: int, width: int) -> Build:
    def make() -> tuple[Callable[[], None], list[Tensor]]:
        model = Gpt(256, width, 1, t, heads=4)
        batch = tuple(torch.randint(0, 256, (n, t)) for _ in range(2))
        module = model if leg == PLAIN else dpfast.GradSampleModuleFastGradientClipping(model)

        def some_steps() -> None:
            for _ in range(STEPS_A_TURN):
                module.zero_grad(set_to_none=True)
                language_losses(module, *batch).mean().backward()

        return some_steps, [*model.parameters(), *batch]

    return make


def _tiny() -> None:
    for leg in (PLAIN, ONE_PASS):
        _builder(leg, 2, 4, 8)()[0]()


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
    {"steps": steps, "norms": norms, "turns": turns}[sys.argv[1] if len(sys.argv) > 1 else "steps"]()


if __name__ == "__main__":
    main()
