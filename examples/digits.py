"""Trains two small models with differential privacy on real handwritten digits: with dpfast and with Opacus.

    python examples/digits.py [--out DIR] [--markdown FILE] [--quick]

Each model is trained five times, from the same weights, on the same Poisson batches and with the same noise:
without privacy, with Opacus's two engines, and with dpfast, step by step and as one compiled graph (which needs a
C++ compiler, and is left out without one). Privacy itself (the sampler, the accountant) is Opacus's in every
private run, and dpfast's optimizer draws the noise that Opacus's would, to the bit; the engines differ in how they
clip each sample's gradient. So the private runs should learn the same, and the step's time and memory tell the
engines apart.

Prints a table and writes `demo.png` and `demo.json`. Fails if dpfast's clipped gradient is not that of a loop
over the samples, or if a private model stays below 80 % on the test set.
"""

import argparse
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import _digits_measure as measure
import _digits_report as report
import torch
import torch.nn as nn
import torch.nn.functional as F
from _digits_models import MODELS, digits
from opacus.accountants import PRVAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModule as OpacusHooks
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhost
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

import dpfast
from dpfast.opacus import DPOptimizerFast

SEED = 0
EPSILON, DELTA = 8.0, 1e-4  # the privacy to reach
MAX_GRAD_NORM = 1.0  # C: what one sample can add to a step, at most
BATCH_SIZE = 256  # expected: a Poisson batch has as many samples as its coins say
GRAPH_SIZE = 288  # of the compiled step: two standard deviations more; smaller batches are padded
LEARNING_RATE, MOMENTUM = 0.3, 0.9
PLAIN_LEARNING_RATE = 0.1  # unclipped gradients are larger
ACCURACY_TO_REACH = 0.80
DIFFERENCE_TO_STAY_BELOW = 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Plan:
    """How much to run; the quick plan only shows that everything works."""

    epochs: int
    reference_samples: int
    timing_rounds: int
    steps_a_turn: int


# The ways to train. Each takes a network, its optimizer and the noise, and returns what the same loop (`train`, below)
# needs: a model, an optimizer and what makes a batch's gradients.


def by_loss(model, criterion):
    def backward(x, y):
        criterion(model(x), y).backward()

    return backward


def plain(net, optimizer, noise):
    return net, optimizer, by_loss(net, nn.CrossEntropyLoss())


def opacus_hooks(net, optimizer, noise):
    """Writes every sample's gradient, then clips."""
    model = OpacusHooks(net, loss_reduction="mean")
    optimizer = DPOptimizer(optimizer, max_grad_norm=MAX_GRAD_NORM, **noise)
    return model, optimizer, by_loss(model, nn.CrossEntropyLoss())


def opacus_ghost(net, optimizer, noise):
    """Two backward passes: one for the norms, one for the gradient of the weighted loss."""
    model = OpacusGhost(net, max_grad_norm=MAX_GRAD_NORM, loss_reduction="mean")
    optimizer = DPOptimizerFastGradientClipping(optimizer, max_grad_norm=MAX_GRAD_NORM, **noise)
    return model, optimizer, by_loss(model, DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss()))


def dpfast_one_pass(net, optimizer, noise):
    """One backward pass of an ordinary loss, after which p.grad is the sum of the clipped gradients."""
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=MAX_GRAD_NORM, loss_reduction="mean")
    optimizer = DPOptimizerFast(optimizer, max_grad_norm=MAX_GRAD_NORM, **noise)
    return model, optimizer, by_loss(model, nn.CrossEntropyLoss())


def dpfast_compiled(net, optimizer, noise):
    """The same as one graph, for batches of up to GRAPH_SIZE; larger ones take several passes through it."""

    def losses(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    step = dpfast.compile_step(net, losses, max_grad_norm=MAX_GRAD_NORM, batch_size=GRAPH_SIZE)
    optimizer = DPOptimizerFast(optimizer, max_grad_norm=MAX_GRAD_NORM, **noise)
    return net, optimizer, step


def noise_alone(net, optimizer, noise):
    """Clips nothing, so it is not private: a step's time with the noise, which every private leg pays."""
    optimizer = DPOptimizerFastGradientClipping(optimizer, max_grad_norm=MAX_GRAD_NORM, **noise)
    return net, optimizer, by_loss(net, nn.CrossEntropyLoss())


def plain_compiled(net, optimizer, noise):
    """What compiling makes of the step without privacy."""
    return net, optimizer, by_loss(torch.compile(net), nn.CrossEntropyLoss())


LEGS = {"plain": plain, "Opacus hooks": opacus_hooks, "Opacus ghost": opacus_ghost, "dpfast": dpfast_one_pass}
TIMED = LEGS | {"noise alone": noise_alone}
if any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
    LEGS["dpfast, compiled"] = dpfast_compiled
    TIMED |= {"dpfast, compiled": dpfast_compiled, "plain, compiled": plain_compiled}

FULL = Plan(epochs=30, reference_samples=BATCH_SIZE, timing_rounds=15, steps_a_turn=5)
QUICK = Plan(epochs=1, reference_samples=32, timing_rounds=2, steps_a_turn=1)


def build(model_name: str, leg: str, sigma: float):
    """The same initial weights and the same noise for every leg of a model."""
    torch.manual_seed(SEED)
    net = MODELS[model_name]().to(DEVICE)
    rate = PLAIN_LEARNING_RATE if leg == "plain" else LEARNING_RATE
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM)
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    noise = {"noise_multiplier": sigma, "expected_batch_size": BATCH_SIZE, "generator": generator}
    return TIMED[leg](net, optimizer, noise)


def train(model, optimizer, backward, batches, after_step=lambda: None):
    """The training loop, the same for every leg."""
    for x, y in batches:
        if len(y):
            backward(x.to(DEVICE), y.to(DEVICE))
        else:
            no_gradient(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def no_gradient(model: nn.Module, optimizer) -> None:
    """The gradient of an empty Poisson batch: nothing, but the noise must be added all the same.

    dpfast takes an empty batch as it is; Opacus's ghost clipping does not, so no leg is given one.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        if type(optimizer) is DPOptimizer:  # it reads one gradient a sample, and there is no sample
            p.grad_sample = p.new_zeros(0, *p.shape)


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Accuracy and loss."""
    model.eval()
    logits = model(x)
    model.train()
    return (logits.argmax(1) == y).float().mean().item(), nn.functional.cross_entropy(logits, y).item()


def poisson_batches(train_set) -> DPDataLoader:
    """Each step, each sample is in the batch with probability BATCH_SIZE / len(train_set)."""
    generator = torch.Generator().manual_seed(SEED)
    return DPDataLoader(train_set, sample_rate=BATCH_SIZE / len(train_set), generator=generator)


def run_leg(model_name: str, leg: str, sigma: float, epochs: int, train_set, test_set):
    """Trains one leg. Returns a row of the table, with the curves, and the trained weights."""
    loader = poisson_batches(train_set)
    model, optimizer, backward = build(model_name, leg, sigma)
    accountant = PRVAccountant()
    if leg != "plain":
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=loader.sample_rate))

    test = [tensor.to(DEVICE) for tensor in test_set.tensors]
    curve = [evaluate(model, *test)]
    with report.progress_bar(f"{model_name}, {leg}", "step", epochs * len(loader)) as bar:
        for _ in range(epochs):
            train(model, optimizer, backward, loader, bar.update)
            curve.append(evaluate(model, *test))
            bar.set_postfix_str(f"test accuracy {curve[-1][0]:.3f}", refresh=False)
    row = {
        "model": model_name,
        "leg": leg,
        "accuracy": curve[-1][0],
        "epsilon": accountant.get_epsilon(DELTA) if leg != "plain" else None,
        "curve_steps": [epoch * len(loader) for epoch in range(epochs + 1)],
        "curve_accuracy": [accuracy for accuracy, _ in curve],
        "curve_loss": [loss for _, loss in curve],
    }
    return row, [p.detach() for p in model.parameters()]


def run_model(model_name: str, sigma: float, plan: Plan, train_set, test_set) -> tuple[dict, ...]:
    """Trains the legs of a model, then compares, times and weighs them."""
    rows, weights = zip(
        *(run_leg(model_name, leg, sigma, plan.epochs, train_set, test_set) for leg in LEGS), strict=True
    )

    x, y = (tensor.to(DEVICE) for tensor in train_set[: plan.reference_samples])
    differences = measure.differences(LEGS, MODELS[model_name], weights[-1], x, y, MAX_GRAD_NORM)
    for leg, difference in differences.items():
        if leg.startswith("dpfast") and difference >= DIFFERENCE_TO_STAY_BELOW:
            sys.exit(f"{model_name}, {leg}: the clipped gradient is off by {difference:.1e}")

    times, memory = measure.in_processes(__file__, model_name, TIMED, plan.timing_rounds, plan.steps_a_turn)
    ratios = {leg: (times[leg] / times["plain"]).median().item() for leg in TIMED}
    for row in rows:
        leg = row["leg"]
        row["samples_per_second"] = BATCH_SIZE / times[leg].median().item()
        row["step_ratio"] = ratios[leg]
        row["noise_alone_ratio"] = ratios["noise alone"]
        row["plain_compiled_ratio"] = ratios.get("plain, compiled")
        row["memory_mb"] = memory[leg]
        row["difference"] = differences.get(leg)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the results go")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown too")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything works")
    parser.add_argument("--leg", nargs=2, help=argparse.SUPPRESS)  # see measure.in_processes
    options = parser.parse_args()
    # Opacus's hooks on a first layer, whose input needs no gradient, and its accountant's first guess: harmless.
    warnings.filterwarnings("ignore", "Full backward hook is firing|Optimal order is the largest alpha")

    torch.set_num_threads(1)  # steps this small gain little from more, and wait for the slowest
    train_set, test_set = digits()
    if options.leg:
        batch = (x.to(DEVICE) for x in train_set[:BATCH_SIZE])
        measure.serve(lambda: build(*options.leg, sigma=1.0), *batch, compiles="compiled" in options.leg[1])
        return

    plan = QUICK if options.quick else FULL
    loader = poisson_batches(train_set)
    sigma = get_noise_multiplier(
        target_epsilon=EPSILON,
        target_delta=DELTA,
        sample_rate=loader.sample_rate,
        steps=plan.epochs * len(loader),
        accountant="prv",
    )
    settings = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, 1 thread",
        "torch": torch.__version__,
        "batch_size": BATCH_SIZE,
        "steps": plan.epochs * len(loader),
        "sigma": sigma,
        "delta": DELTA,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    rows = [row for model in MODELS for row in run_model(model, sigma, plan, train_set, test_set)]
    report.write(rows, settings, options.out, options.markdown)

    worst = min(row["accuracy"] for row in rows if row["leg"] != "plain")
    if not options.quick and worst < ACCURACY_TO_REACH:
        sys.exit(f"a private model stayed at a test accuracy of {worst:.3f}, below {ACCURACY_TO_REACH}")


if __name__ == "__main__":
    main()
