"""Flat, per-layer and automatic clipping of one model, with the same noise multiplier and the same ε.

    python examples/per_layer.py [--steps 100]

Per-layer clipping (McMahan et al. 2018) gives each parameter a threshold of its own. Norm and clipped sum of a layer
are then taken where the backward pass stands, and nothing is kept. What one sample can move is the root of the
thresholds' squares, which `model.sensitivity` says and `OnePassOptimizer` scales the noise by. Automatic clipping (Bu
et al. 2022) has no threshold to tune: every sample is scaled to nearly C. A perceptron on the digits of scikit-learn.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from _digits_models import digits
from opacus.accountants import RDPAccountant

import dpfast
from dpfast.opacus import OnePassOptimizer

RATE, SIGMA, DELTA = 0.1, 1.0, 1e-4
PARAMETERS = 4
CLIPPERS = {
    "flat": lambda: dpfast.ConstantFlatClipper(1.0),
    "per layer": lambda: dpfast.ConstantPerLayerClipper(1.0 / math.sqrt(PARAMETERS)),  # the same sensitivity
    "automatic": lambda: dpfast.AutomaticClipper(1.0),
}


def train(clipper: dpfast.NormClipper, steps: int) -> tuple[float, float, float]:
    """Returns accuracy, ε and sensitivity."""
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = (some.tensors for some in digits())
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = dpfast.GradSampleModuleFastGradientClipping(net, norm_clipper=clipper)
    optimizer = OnePassOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        module=model,
        noise_multiplier=SIGMA,
        max_grad_norm=model.sensitivity,
        expected_batch_size=RATE * len(x),
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=RATE))
    for _ in range(steps):
        drawn = torch.rand(len(x)) < RATE
        optimizer.zero_grad()
        F.cross_entropy(model(x[drawn]), y[drawn]).backward()
        optimizer.step()
    accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    return accuracy, accountant.get_epsilon(DELTA), model.sensitivity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, clipper in CLIPPERS.items():
        accuracy, epsilon, sensitivity = train(clipper(), options.steps)
        print(
            f"{name}: test accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = {DELTA}; a sample moves the sum by at "
            f"most {sensitivity:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
