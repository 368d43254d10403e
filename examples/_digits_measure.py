"""What `digits.py` measures beside accuracy: the clipped gradient's error, a step's time and peak memory."""

import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from _digits_report import progress_bar

CLEAR_PEAK = Path("/proc/self/clear_refs")


def clipped_sum(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, max_grad_norm: float) -> list[torch.Tensor]:
    """Σ c_n g_n, c_n = min(1, C / ‖g_n‖), one sample at a time: slow, and right by construction."""
    params = list(net.parameters())
    total = [torch.zeros_like(p) for p in params]
    for n in range(len(y)):
        gradient = torch.autograd.grad(F.cross_entropy(net(x[n : n + 1]), y[n : n + 1]), params)
        norm = torch.stack([g.norm() for g in gradient]).norm()
        factor = (max_grad_norm / norm).clamp(max=1.0)
        for sum_, g in zip(total, gradient, strict=True):
            sum_ += factor * g
    return total


def differences(legs, make_net, weights, x, y, max_grad_norm: float) -> dict[str, float]:
    """Of each private leg: the clipped gradient's relative L2 difference from `clipped_sum` in float64.

    The largest over all parameters. It is taken where the leg hands the gradient to the wrapped optimizer,
    with noise 0 and a divisor of 1.
    """

    def fresh_net() -> torch.nn.Module:
        net = make_net().to(x.device)
        with torch.no_grad():
            for p, value in zip(net.parameters(), weights, strict=True):
                p.copy_(value)
        return net

    expected = clipped_sum(fresh_net().double(), x.double(), y, max_grad_norm)
    worst = {}
    for name, leg in legs.items():
        if name == "plain":
            continue
        net = fresh_net()
        no_noise = {"noise_multiplier": 0.0, "expected_batch_size": 1}
        _, optimizer, backward = leg(net, torch.optim.SGD(net.parameters(), lr=0.0), no_noise)
        backward(x, y)
        optimizer.pre_step()
        worst[name] = max(
            ((p.grad.double() - e).norm() / e.norm()).item() for p, e in zip(net.parameters(), expected, strict=True)
        )
    return worst


def step(model, optimizer, backward, x: torch.Tensor, y: torch.Tensor) -> None:
    backward(x, y)
    optimizer.step()
    optimizer.zero_grad()


def in_processes(
    script: str, model_name: str, legs: Iterable[str], rounds: int, steps_a_turn: int
) -> tuple[dict[str, torch.Tensor], dict[str, float | None]]:
    """Of each leg: the seconds a step takes, in each round, and the peak memory in MB, None where it cannot be known.

    Each leg has a process of its own, as a training has, and they take turns, so all meet the same machine. A step is
    all of it: forward, backward, clipping, noise and the update.
    """
    command = [sys.executable, script, "--leg", model_name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {leg: subprocess.Popen([*command, leg], **pipes) for leg in legs}

    def answer(leg: str) -> float | None:
        line = processes[leg].stdout.readline()
        if not line:
            raise RuntimeError(f"{model_name}, {leg}: its process has ended, with status {processes[leg].wait()}")
        return json.loads(line)

    try:
        memory = {leg: answer(leg) for leg in processes}
        times = {leg: [] for leg in processes}
        with progress_bar("timing the steps", "round", rounds) as bar:
            for _ in range(rounds):
                for leg, process in processes.items():
                    print(steps_a_turn, file=process.stdin, flush=True)
                    times[leg].append(answer(leg))
                bar.update()
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return {leg: torch.tensor(values) for leg, values in times.items()}, memory


def serve(make_training: Callable[[], tuple], x: torch.Tensor, y: torch.Tensor, *, compiles: bool) -> None:
    """What such a process does: says the peak memory, then, for each number of steps that it reads, the seconds of
    one. ``compiles``: the first step does, which is no part of what is measured."""
    training = make_training()
    first = training if compiles else make_training()
    print(json.dumps(peak_memory(first, training, x, y)), flush=True)
    for line in sys.stdin:
        synchronize(x)
        start = time.perf_counter()
        for _ in range(int(line)):
            step(*training, x, y)
        synchronize(x)
        print((time.perf_counter() - start) / int(line), flush=True)


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def peak_memory(first: tuple, training: tuple, x: torch.Tensor, y: torch.Tensor) -> float | None:
    """MB that three steps take at their peak on top of what the process holds before the first.

    On a CPU it is the peak of the resident set, which only Linux lets a process reset. (`ru_maxrss` would
    not do: a child process inherits its parent's.)
    """
    if not x.is_cuda and not CLEAR_PEAK.exists():
        return None
    step(*first, x[:2], y[:2])  # not measured: libraries are loaded
    give_back_what_is_free()  # which, of the compiled step, is all that the next ones take
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        CLEAR_PEAK.write_text("5")
        before = resident("VmRSS")
    for _ in range(3):
        step(*training, x, y)
    peak = torch.cuda.max_memory_allocated() if x.is_cuda else resident("VmHWM")
    return (peak - before) / 1e6


def give_back_what_is_free() -> None:
    """To the operating system, where the C library can."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def resident(key: str) -> int:
    """Bytes: VmRSS is what the process holds now, VmHWM the most that it held."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", status)[1])
