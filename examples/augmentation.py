"""Augmentation multiplicity: K augmentations of each image, clipped as one (De et al. 2022, arXiv:2204.13650).

    python examples/augmentation.py [--seeds 5] [--steps 150] [--tune]

Trains a small convolutional network on the handwritten digits of scikit-learn with differential privacy: without
augmentation, with one augmentation (a small rotation and shift) of each image a step, and with eight, whose mean
gradient is clipped as one. Sampler, noise, steps and ε are the same; only whose gradient is clipped differs, which
is said by `model.units(...)`. Prints one table.

`--tune` prints the search that `LEARNING_RATES` comes from: five rates for each way, on a part of the training set that
the network then does not see, with seeds of its own. The search itself is not counted in ε.
"""

import argparse
import math
import warnings
from statistics import mean

import torch
import torch.nn.functional as F
from _digits_models import digits
from opacus.accountants import PRVAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizerFastGradientClipping
from torch import Tensor, nn

import dpfast

EPSILON, DELTA = 8.0, 1e-4
MAX_GRAD_NORM = 1.0  # C: what one image can add to a step, at most
RATE = 0.2  # with which each image is drawn for a step
MOMENTUM = 0.9
ANGLE, SHIFT = 10.0, 0.5  # degrees and pixels, at most
WAYS = {"no augmentation": 0, "K = 1": 1, "K = 8": 8}
LEARNING_RATES = {"no augmentation": 0.1875, "K = 1": 0.1875, "K = 8": 0.1875}  # as --tune finds
CANDIDATES = (0.0625, 0.125, 0.1875, 0.25, 0.5)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """(N, 1, 8, 8) -> the same, each rotated and shifted a little; what comes in from outside is background."""
    angle, x, y = 2 * torch.rand(3, len(images), generator=generator) - 1
    angle, x, y = angle * math.radians(ANGLE), x * SHIFT / 4, y * SHIFT / 4  # a grid's side is 2 long
    turn = torch.stack([angle.cos(), -angle.sin(), x, angle.sin(), angle.cos(), y], 1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images + 1, grid, align_corners=False) - 1  # background is -1


def train(
    k: int, learning_rate: float, seed: int, steps: int, images: Tensor, labels: Tensor
) -> tuple[nn.Module, float]:
    """DP-SGD. Each step, each image is drawn with probability ``RATE``, and is one unit with its k augmentations.

    Returns the network and its ε.
    """
    sigma = get_noise_multiplier(
        target_epsilon=EPSILON, target_delta=DELTA, sample_rate=RATE, steps=steps, accountant="prv"
    )
    torch.manual_seed(seed)
    model = dpfast.GradSampleModuleFastGradientClipping(network(), max_grad_norm=MAX_GRAD_NORM, loss_reduction="mean")
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM),
        noise_multiplier=sigma, max_grad_norm=MAX_GRAD_NORM, expected_batch_size=RATE * len(images),
    )  # fmt: skip
    accountant = PRVAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=RATE))
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = torch.rand(len(images), generator=draws) < RATE
        x, y = images[drawn], labels[drawn]
        ids = torch.arange(len(x)).repeat_interleave(max(1, k))  # whose each augmentation is
        x, y = x[ids], y[ids]
        if k > 0:
            x = augmented(x, draws)
        optimizer.zero_grad()
        with model.units(ids, int(drawn.sum()), per_unit="mean"):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.to_standard_module(), accountant.get_epsilon(DELTA)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Of the images, in per cent."""
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def tune(images: Tensor, labels: Tensor, steps: int) -> None:
    """Prints the accuracy on the last quarter of the training set, of which the network has seen the rest."""
    seen = len(images) * 3 // 4
    for way, k in WAYS.items():
        for rate in CANDIDATES:
            models = [train(k, rate, 1000 + seed, steps, images[:seen], labels[:seen])[0] for seed in range(2)]
            found = mean(accuracy(model, images[seen:], labels[seen:]) for model in models)
            print(f"{way}, learning rate {rate}: {found:.2f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how often each way is trained")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tune", action="store_true", help="search the learning rates")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Optimal order is the largest alpha")  # the accountant's first guess
    torch.set_num_threads(1)
    (train_x, train_y), (test_x, test_y) = (some.tensors for some in digits())
    train_x, test_x = (x.view(-1, 1, 8, 8) for x in (train_x, test_x))
    if options.tune:
        tune(train_x, train_y, options.steps)
        return
    print("| | learning rate | ε | test accuracy, mean of seeds | of each seed |")
    print("|---|---|---|---|---|")
    for way, k in WAYS.items():
        rate = LEARNING_RATES[way]
        runs = [train(k, rate, seed, options.steps, train_x, train_y) for seed in range(options.seeds)]
        found = [accuracy(model, test_x, test_y) for model, _ in runs]
        each = ", ".join(f"{x:.1f}" for x in found)
        print(f"| {way} | {rate} | {runs[0][1]:.2f} | {mean(found):.1f} % | {each} |", flush=True)


if __name__ == "__main__":
    main()
