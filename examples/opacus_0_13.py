"""Differentially private training as it was written for Opacus 0.13: a plain model, hooks, and a clipper by hand.

    python examples/opacus_0_13.py [--epochs 12]

`autograd_grad_sample` puts the hooks on and takes them off; `PerSampleGradientClipper` (which hooks the model by
itself) clips each micro-batch and averages at the step; the noise is added here, where 0.13's engine added it.
Prints the accuracy and the ε that was spent.
"""

import argparse

import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import nn

from dpfast import ConstantFlatClipper, PerSampleGradientClipper
from dpfast.modes import autograd_grad_sample

SAMPLES, FEATURES, CLASSES = 2048, 20, 4
BATCH, MICRO_BATCH = 256, 64  # expected samples in a step; the most that are differentiated at once
NOISE_MULTIPLIER, DELTA, LEARNING_RATE = 1.0, 1e-4, 1.0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Four clouds of points."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return centers[y] + torch.randn(SAMPLES, FEATURES, generator=generator), y


def median_norm(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """A threshold to clip to: the median of the gradients' norms on data that is public."""
    autograd_grad_sample.add_hooks(model, loss_reduction="mean", batch_first=True)
    F.cross_entropy(model(x), y).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
    autograd_grad_sample.remove_hooks(model)
    model.zero_grad()
    return norms.median().item()


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, max_grad_norm: float, epochs: int) -> RDPAccountant:
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(max_grad_norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    accountant = RDPAccountant()
    rate = BATCH / len(y)
    for _ in range(epochs * len(y) // BATCH):
        drawn = (torch.rand(len(y)) < rate).nonzero().flatten()  # Poisson sampling, as the accountant assumes
        for part in drawn.split(MICRO_BATCH):
            F.cross_entropy(model(x[part]), y[part]).backward()
            clipper.clip_and_accumulate()
            optimizer.zero_grad()
        thresholds, samples = clipper.pre_step()
        for p, threshold in zip(model.parameters(), thresholds, strict=True):
            # The average is over the drawn, whose number is private: make it the expected number.
            p.grad *= samples / BATCH
            p.grad += torch.randn_like(p) * NOISE_MULTIPLIER * threshold / BATCH
        optimizer.step()
        clipper.zero_grad()
        accountant.step(noise_multiplier=NOISE_MULTIPLIER, sample_rate=rate)
    clipper.close()
    return accountant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = data()
    public, private, test = slice(0, 64), slice(64, 1536), slice(1536, None)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    accountant = train(model, x[private], y[private], median_norm(model, x[public], y[public]), options.epochs)
    autograd_grad_sample.disable_hooks()  # none is left on this model; 0.13's way to switch off those of a process
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    autograd_grad_sample.enable_hooks()
    print(f"test accuracy {accuracy:.3f} at epsilon {accountant.get_epsilon(DELTA):.2f}, delta {DELTA}")
    if options.epochs >= 12 and accuracy < 0.9:
        raise SystemExit("it did not learn")


if __name__ == "__main__":
    main()
