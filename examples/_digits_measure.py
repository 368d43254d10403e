"""What `digits.py` measures beside accuracy: the clipped gradient's error, a step's time and peak memory."""

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
        model, optimizer, criterion = leg(net, torch.optim.SGD(net.parameters(), lr=0.0), no_noise)
        criterion(model(x), y).backward()
        optimizer.pre_step()
        worst[name] = max(
            ((p.grad.double() - e).norm() / e.norm()).item() for p, e in zip(net.parameters(), expected, strict=True)
        )
    return worst


def step(model, optimizer, criterion, x: torch.Tensor, y: torch.Tensor) -> None:
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def step_times(trainings: dict[str, tuple], x, y, rounds: int, steps_a_turn: int) -> dict[str, torch.Tensor]:
    """Seconds a step takes, of each leg in each round. The legs take turns, so all meet the same machine.

    A step is all of it: forward, backward, clipping, noise and the update.
    """
    times = {leg: [] for leg in trainings}
    for training in trainings.values():  # not measured: buffers are allocated, kernels compiled
        step(*training, x, y)
    with progress_bar("timing the steps", "round", rounds) as bar:
        for _ in range(rounds):
            for leg, training in trainings.items():
                synchronize(x)
                start = time.perf_counter()
                for _ in range(steps_a_turn):
                    step(*training, x, y)
                synchronize(x)
                times[leg].append((time.perf_counter() - start) / steps_a_turn)
            bar.update()
    return {leg: torch.tensor(values) for leg, values in times.items()}


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def peak_memory_of_each(script: str, model_name: str, legs: Iterable[str]) -> dict[str, float | None]:
    """Peak memory of each leg in MB, each in a process of its own; None where it cannot be known."""
    command = [sys.executable, script, "--memory", model_name]
    processes = {leg: subprocess.Popen([*command, leg], stdout=subprocess.PIPE, text=True) for leg in legs}
    answers = {}
    for leg, process in processes.items():
        answer = process.communicate()[0].strip()
        if process.returncode:
            raise RuntimeError(f"{model_name}, {leg}: the memory measurement failed")
        answers[leg] = None if answer == "None" else float(answer)
    return answers


def peak_memory(make_training: Callable[[], tuple], x: torch.Tensor, y: torch.Tensor) -> float | None:
    """MB that three steps take at their peak on top of what the process holds before the first.

    On a CPU it is the peak of the resident set, which only Linux lets a process reset. (`ru_maxrss` would
    not do: a child process inherits its parent's.)
    """
    if not x.is_cuda and not CLEAR_PEAK.exists():
        return None
    step(*make_training(), x[:2], y[:2])  # not measured: libraries are loaded
    training = make_training()
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


def resident(key: str) -> int:
    """Bytes: VmRSS is what the process holds now, VmHWM the most that it held."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", status)[1])
