"""The private step as one compiled graph, for Poisson batches of any size.

    python examples/compiled_step.py [--steps 60]

Trains a perceptron of three layers on the handwritten digits of scikit-learn twice, with the same draws and noise: by
the eager step and by `dpfast.compile_step`, which pads a draw to its `batch_size` and masks what it has added. Prints
accuracy, ε, and the CPU time of a step; compiling, which happens once, stands by itself.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from _digits_models import digits
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

import dpfast
from dpfast.opacus import DPOptimizerFast

RATE, SIGMA, MAX_GRAD_NORM, DELTA = 0.05, 1.0, 1.0, 1e-4
BATCH_SIZE = 90  # of the graph: two standard deviations above the 72 that are expected


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss a sample, (N,)."""
    return F.cross_entropy(model(x), y, reduction="none")


def train(compiled: bool, steps: int) -> tuple[float, float, float, list[float]]:
    """Returns accuracy, ε, the first step's seconds and those of each later one."""
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = (some.tensors for some in digits())
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if compiled:
        step = dpfast.compile_step(net, losses, max_grad_norm=MAX_GRAD_NORM, batch_size=BATCH_SIZE)
    else:
        model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=MAX_GRAD_NORM)

        def step(x: Tensor, y: Tensor) -> None:
            losses(model, x, y).mean().backward()

    optimizer = DPOptimizerFast(
        torch.optim.SGD(net.parameters(), lr=1.0),
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=RATE * len(x),
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=RATE))
    draws, seconds = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        drawn = torch.rand(len(x), generator=draws) < RATE
        optimizer.zero_grad()
        start = time.process_time()
        step(x[drawn], y[drawn])
        seconds.append(time.process_time() - start)
        optimizer.step()
    accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    return accuracy, accountant.get_epsilon(DELTA), seconds[0], seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, compiled in (("eager", False), ("compiled", True)):
        accuracy, epsilon, first, later = train(compiled, options.steps)
        print(
            f"{name}: test accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = {DELTA}; "
            f"{1000 * statistics.median(later):.2f} ms a clipped gradient, the first {first:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
