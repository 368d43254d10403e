"""``python -m dpfast demo``: a small model trained privately, and one step of it beside others' steps.

It needs nothing but torch, so it runs from a wheel; the demo on real digits, with pictures, is ``make demo`` in the
repository.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast.commands.show import table
from dpfast.modes import GradSampleModuleFastGradientClipping
from dpfast.report import clock

CLASSES, VOCABULARY, T, WIDTH = 4, 50, 48, 128
TRAINED_ON, BATCH, STEPS, ROUNDS, CHECKED = 2048, 64, 60, 7, 8
C, SIGMA, DELTA, RATE = 1.0, 1.0, 1e-4, 0.5

Training = Callable[[], None]


class Net(nn.Module):
    """Sorts sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens))
        return self.head((x + self.down(F.gelu(self.up(x)))).mean(1))


def sequences(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n made-up sequences: each class likes other tokens."""
    likes = torch.rand(CLASSES, VOCABULARY, generator=torch.Generator().manual_seed(7)).mul(2.0).exp()
    y = torch.randint(CLASSES, (n,), generator=generator)
    return torch.multinomial(likes[y], T, replacement=True, generator=generator), y


class Demo:
    """What is run; :attr:`steps` of it."""

    steps = STEPS + ROUNDS + 2

    def run(self, done: Callable[[], None]) -> dict[str, Any]:
        """Trains, compares and times; ``done`` is called after each step."""
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = Net()
            x, y = sequences(TRAINED_ON, generator)
            found: dict[str, Any] = {"difference": _difference(net, x[:CHECKED], y[:CHECKED])}
            done()
            found["steps"] = _step_times(net, x[:BATCH], y[:BATCH], done)
            found["accuracy_before"] = _accuracy(net)
            _train(net, x, y, generator, done)
            found["accuracy"] = _accuracy(net)
        found["epsilon"], found["delta"] = _epsilon(), DELTA
        found["trained"] = f"{STEPS} steps, Poisson batches of {BATCH} expected of {TRAINED_ON} samples, σ = {SIGMA}"
        done()
        return found

    def show(self, found: dict[str, Any]) -> None:
        """Prints it."""
        rows = [(name, f"{ms:.2f}", f"{ms / found['steps']['plain']:.2f}") for name, ms in found["steps"].items()]
        table(("step", "ms", "plain steps"), rows, f"Forward, backward and clipping, N={BATCH}, T={T}")
        print(
            f"p.grad is the sum of {CHECKED} gradients clipped one by one in fp64, but for {found['difference']:.0e}: "
            "norms are taken at a proven upper bound"
        )
        epsilon = "ε: pip install opacus" if found["epsilon"] is None else f"ε = {found['epsilon']:.2f} at δ = {DELTA}"
        print(f"trained privately: {found['trained']}, {epsilon}")
        print(f"right on new samples: {found['accuracy_before']:.0%} before, {found['accuracy']:.0%} after")
        print("on real digits, with pictures: `make demo` in the repository (examples/digits.py)")


def _wrapped(net: nn.Module) -> nn.Module:
    return GradSampleModuleFastGradientClipping(net, max_grad_norm=C)


def _difference(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Of ``p.grad`` from the loop over samples, relative, over all parameters."""
    exact, ours = copy.deepcopy(net).double(), copy.deepcopy(net)
    parameters = list(exact.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(y)):
        one = torch.autograd.grad(F.cross_entropy(exact(x[i : i + 1]), y[i : i + 1]), parameters)
        norm = torch.stack([g.norm() for g in one]).norm()
        for whole, g in zip(total, one, strict=True):
            whole += g * (C / norm).clamp(max=1.0)
    F.cross_entropy(_wrapped(ours)(x), y).backward()
    found = torch.cat([p.grad.double().flatten() for p in ours.parameters() if p.grad is not None])
    expected = torch.cat([t.flatten() for t in total])
    return float((found - expected).norm() / expected.norm())


def _legs(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Training]:
    plain, ours = copy.deepcopy(net), _wrapped(copy.deepcopy(net))
    legs = {"plain": lambda: _backward(plain, x, y), "dpfast": lambda: _backward(ours, x, y)}
    try:
        from opacus.grad_sample import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    except ImportError:
        return legs
    noise = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": len(y)}
    # Its hooks on a first layer, whose input needs no gradient: harmless.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    hooks, ghost = GradSampleModule(copy.deepcopy(net)), Ghost(copy.deepcopy(net), max_grad_norm=C)
    of_hooks = DPOptimizer(torch.optim.SGD(hooks.parameters(), lr=0.0), **noise)
    of_ghost = DPOptimizerFastGradientClipping(torch.optim.SGD(ghost.parameters(), lr=0.0), **noise)
    losses = DPLossFastGradientClipping(ghost, of_ghost, nn.CrossEntropyLoss())

    def hooks_step() -> None:
        F.cross_entropy(hooks(x), y).backward()
        of_hooks.clip_and_accumulate()
        of_hooks.zero_grad()

    def ghost_step() -> None:
        losses(ghost(x), y).backward()
        of_ghost.zero_grad()

    return {**legs, "Opacus hooks": hooks_step, "Opacus ghost": ghost_step}


def _backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    model.zero_grad(set_to_none=True)


def _step_times(net: nn.Module, x: Tensor, y: Tensor, done: Callable[[], None]) -> dict[str, float]:
    """Milliseconds, the median of rounds in which each takes its turn."""
    legs, now = _legs(net, x, y), clock("cpu")
    times: dict[str, list[float]] = {name: [] for name in legs}
    for _ in range(ROUNDS):
        for name, step in legs.items():
            step()  # finds the caches as it left them
            start = now()
            step()
            times[name].append(1e3 * (now() - start))
        done()
    return {name: statistics.median(each) for name, each in times.items()}


def _train(net: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, done: Callable[[], None]) -> None:
    """DP-SGD, written out."""
    model, optimizer = _wrapped(net), torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(STEPS):
        taken = torch.rand(len(y), generator=generator) < BATCH / len(y)
        F.cross_entropy(model(x[taken]), y[taken]).backward()
        for p in net.parameters():
            noise = torch.randn(p.shape, generator=generator) * (SIGMA * C)
            p.grad = (p.grad + noise) / BATCH  # type: ignore[operator]  # backward has left it
        optimizer.step()
        optimizer.zero_grad()
        done()


@torch.no_grad()
def _accuracy(net: nn.Module) -> float:
    x, y = sequences(1000, torch.Generator().manual_seed(1))
    return float((Net.forward(net, x).argmax(1) == y).float().mean())  # type: ignore[arg-type]  # it is one


def _epsilon() -> float | None:
    """By Opacus's accountant, where it is installed."""
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        return None
    accountant = RDPAccountant()
    for _ in range(STEPS):
        accountant.step(noise_multiplier=SIGMA, sample_rate=BATCH / TRAINED_ON)
    return float(accountant.get_epsilon(DELTA))


demo = Demo()
