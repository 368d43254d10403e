"""A training loop of one's own: each step a Poisson draw, a clipped gradient, noise, and its cost in ε.

    python examples/plain_loop.py [--steps 100]

A perceptron on the handwritten digits of scikit-learn. dpfast clips, and `DPOptimizerFast` adds the noise; the draw and
the loss are the loop's. Prints accuracy, ε, and how the norms lay to the threshold.
"""

import argparse

import torch
import torch.nn.functional as F
from _digits_models import digits
from opacus.accountants import RDPAccountant

import dpfast
from dpfast.opacus import DPOptimizerFast

RATE = 0.1  # with which each scan is drawn for a step
SIGMA, MAX_GRAD_NORM, DELTA = 1.0, 1.0, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = (some.tensors for some in digits())
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=MAX_GRAD_NORM)
    optimizer = DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=RATE * len(x),  # never the drawn number, which is private
    )
    accountant = RDPAccountant()
    for step in range(1, steps + 1):
        drawn = torch.rand(len(x)) < RATE  # each scan by itself: what the accountant counts on
        optimizer.zero_grad()
        F.cross_entropy(model(x[drawn]), y[drawn]).backward()  # p.grad is the sum of the clipped gradients
        optimizer.step()  # adds the noise and divides by the expected batch
        accountant.step(noise_multiplier=SIGMA, sample_rate=RATE)
        if step % 25 == 0:
            clipped = (model.get_clipping_coef() < 1).float().mean()
            accuracy = (net(test_x).argmax(1) == test_y).float().mean()
            print(
                f"step {step}: test accuracy {accuracy:.3f}, ε = {accountant.get_epsilon(DELTA):.2f} at δ = {DELTA}; "
                f"{clipped:.0%} of the last draw were clipped"  # of private data: look at it, do not publish it
            )


if __name__ == "__main__":
    main()
