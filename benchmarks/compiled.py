"""The compiled private step over the plain step, captured and compiled the same way: docs/compiled.md's tables.

    python benchmarks/compiled.py              # every workload, rows to benchmarks/results/compiled.jsonl
    python benchmarks/compiled.py toy --no-write
    python benchmarks/compiled.py toy --cold   # what compiling takes, in a process with an empty cache and in a second

A step is zero_grad, forward, backward and clipping, without noise or optimizer. Legs take turns in one process on one
thread, step by step: the figure is the median over rounds of CPU time, and of (leg / compiled plain) within a round.
The compiled private step's sums are compared with a loop over samples in fp64 first. On a GPU (`--part compiled` of
benchmarks/gpu.py) both compiled steps are CUDA graphs, and it is the time that passes.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from rows import RESULTS, Rows, environment
from step import exact_gradient, largest_error, timed
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from workloads import WORKLOADS, Gpt, Workload, language_losses

import dpfast
from dpfast.compiled.replay import Replay
from dpfast.testing import loop_over_samples, norms_of, relative_error

ROUNDS, WARM_UP = 30, 3
TOLERANCE = 1e-4


def _toy() -> Workload:
    def tokens() -> tuple[Tensor, ...]:
        return tuple(torch.randint(0, 100, (4, 8)) for _ in range(2))

    return Workload("toy", "Toy GPT: d=32, 2 blocks, T=8, N=4", lambda: Gpt(100, 32, 2, 8), tokens, language_losses, 4)


MODELS = {"toy": _toy(), **{name: WORKLOADS[name] for name in ("mlp", "lora", "gpt")}}
ON_GPU = {name: WORKLOADS[name] for name in ("gpt2-1024", "llama-1b")}


def compiled_plain(model: nn.Module, workload: Workload, batch: tuple[Tensor, ...]) -> Callable[[], None]:
    """The plain step as one graph that leaves ``p.grad``."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    buffers = dict(model.named_buffers())
    trainable = [p for p in parameters if p.requires_grad]

    def gradients(values: list[Tensor], *batch: Tensor) -> tuple[Tensor, ...]:
        state = {**dict(zip(names, values, strict=True)), **buffers}
        with torch.enable_grad():
            losses = workload.losses(lambda *inputs: functional_call(model, state, inputs), *batch)
            return torch.autograd.grad(losses.mean(), [x for x in values if x.requires_grad])

    graph = torch.compile(
        make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(list(parameters), *batch)
    )
    number = len(parameters)
    replay = Replay(lambda *given: graph(list(given[:number]), *given[number:]))

    def step() -> None:
        model.zero_grad()
        with torch.no_grad():
            on_gpu = workload.device == "cuda"
            found = replay(parameters, batch) if on_gpu else graph(list(parameters), *batch)
            for p, gradient in zip(trainable, found, strict=True):
                p.grad = gradient

    return step


def legs(workload: Workload) -> dict[str, Callable[[], None]]:
    """By name, the compiled plain step first."""
    torch.manual_seed(0)
    model, batch = workload.build().to(device=workload.device, dtype=workload.dtype), workload.batch()
    plain, eager, compiled = (copy.deepcopy(model) for _ in range(3))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(eager, max_grad_norm=1.0)
    private = dpfast.compile_step(compiled, workload.losses, max_grad_norm=1.0, batch_size=len(batch[0]))

    def run_plain() -> None:
        plain.zero_grad()
        workload.losses(plain, *batch).mean().backward()

    def run_eager() -> None:
        eager.zero_grad()
        workload.losses(wrapped, *batch).mean().backward()

    def run_private() -> None:
        compiled.zero_grad()
        private(*batch)

    (_check_in_16_bits if workload.device == "cuda" else _check)(workload, model, private, compiled, batch)
    return {
        "plain, compiled": compiled_plain(copy.deepcopy(model), workload, batch),
        "dpfast, compiled": run_private,
        "plain": run_plain,
        "dpfast one-pass": run_eager,
    }


def _check(workload: Workload, model: nn.Module, private: Callable, compiled: nn.Module, batch: tuple) -> None:
    few = tuple(x[: workload.check_samples] for x in batch)
    exact = loop_over_samples(model, lambda *given: workload.losses(*given).sum(), *few)
    private(*few)
    factors, norms = private.clip_factors.double(), norms_of(exact)
    careful = (1.0 - factors * norms.clamp(min=1.0)).aminmax()  # norms are bounded from above, a little
    assert careful.min >= 0.0 and careful.max <= 1e-3, f"{workload.name}: clip factors are too small by {careful}"
    for name, gradients in exact.items():
        found = dict(compiled.named_parameters())[name].grad
        assert found is not None
        error = relative_error(found, torch.tensordot(factors, gradients, 1))
        assert error <= TOLERANCE, f"{workload.name}: {name} is off by {error:.1e}"


def _check_in_16_bits(
    workload: Workload, model: nn.Module, private: Callable, compiled: nn.Module, batch: tuple
) -> None:
    exact, allowed = exact_gradient(workload, model, batch)
    private(*(x[: workload.check_samples] for x in batch))
    error = largest_error({name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}, exact)
    assert error <= allowed, f"{workload.name} is off by {error:.1e}, where {allowed:.1e} is allowed"


def measure(workload: Workload, rounds: int) -> list[dict]:
    times: dict[str, list[float]] = {}
    all_legs = legs(workload)
    for i in range(WARM_UP + rounds):
        for name, step in all_legs.items():
            seconds = timed(workload, step, ())
            if i >= WARM_UP:
                times.setdefault(name, []).append(seconds)
    base = times["plain, compiled"]
    return [
        {
            "workload": workload.name,
            "title": workload.title,
            "leg": name,
            "ms": 1e3 * statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, base, strict=True)),
            "ratio_of_minima": min(taken) / min(base),
            "rounds": rounds,
        }
        for name, taken in times.items()
    ]


def first_step(workload: Workload) -> None:
    """Prints what the first step takes, (wall, CPU) seconds."""
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch()
    step = dpfast.compile_step(model, workload.losses, max_grad_norm=1.0, batch_size=len(batch[0]))
    start = time.perf_counter()
    step(*batch)
    used = os.times()
    print(time.perf_counter() - start, used.user + used.system + used.children_user + used.children_system)


def compile_times(workload: Workload) -> list[dict]:
    """With an empty cache, and in a second process with what the first left."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for what in ("first step, cold", "first step, from the cache"):
            command = [sys.executable, __file__, workload.name, "--first-step"]
            said = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
            wall, cpu = map(float, said.split()[-2:])
            rows.append({"workload": workload.name, "title": workload.title, "leg": what, "s": wall, "cpu_s": cpu})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*MODELS, []], help="all unless given")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cold", action="store_true", help="measure compiling, not the steps")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.workloads or MODELS:
        workload = MODELS[name]
        if options.first_step:
            first_step(workload)
            continue
        found = compile_times(workload) if options.cold else measure(workload, options.rounds)
        rows = None if options.no_write else Rows(RESULTS / "compiled.jsonl", environment("cpu"))
        for row in found:
            if rows is not None:
                rows.add(**row)
            numbers = " ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float))
            print(f"{row['title']} | {row['leg']} | {numbers}", flush=True)


if __name__ == "__main__":
    main()
