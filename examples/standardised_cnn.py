"""A CNN as De et al. (2022, arXiv:2204.13650) train it: weight standardisation, group norm, augmentation multiplicity.

    python examples/standardised_cnn.py [--steps 60]

On the handwritten digits of scikit-learn, at one ε: with plain convolutions and no augmentation, with standardised
weights, and with both, where four shifted and turned copies of a scan are clipped as one. A standardised layer is a
module of one's own; it needs no rule. On scans this small, with a network this small, neither pays (one seed;
`examples/augmentation.py` looks at augmentation over seeds); on CIFAR-10 both do.
"""

import argparse
import warnings

import torch
import torch.nn.functional as F
from _digits_models import digits
from augmentation import augmented
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

import dpfast
from dpfast.opacus import DPOptimizerFast

RATE, SIGMA, MAX_GRAD_NORM, DELTA = 0.2, 2.0, 1.0, 1e-4
COPIES = 4


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 / (inputs of a filter), whatever its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        weight = (self.weight - mean) * torch.rsqrt(variance * self.weight[0].numel() + 1e-4)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def network(convolution: type[nn.Conv2d]) -> nn.Module:
    return nn.Sequential(
        convolution(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        convolution(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def train(convolution: type[nn.Conv2d], copies: int, steps: int) -> tuple[float, float]:
    """Returns accuracy and ε."""
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = (some.tensors for some in digits())
    x, test_x = x.view(-1, 1, 8, 8), test_x.view(-1, 1, 8, 8)
    net = network(convolution)
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=MAX_GRAD_NORM)
    optimizer = DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=RATE * len(x),
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=RATE))
    draws = torch.Generator().manual_seed(0)
    for _ in range(steps):
        drawn = (torch.rand(len(x), generator=draws) < RATE).nonzero().flatten()
        ids = torch.arange(len(drawn)).repeat_interleave(max(1, copies))  # whose each image is
        images, labels = x[drawn][ids], y[drawn][ids]
        if copies:
            images = augmented(images, draws)
        optimizer.zero_grad()
        with model.units(ids, len(drawn), per_unit="mean"):
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    return accuracy, accountant.get_epsilon(DELTA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="opacus")
    torch.set_num_threads(1)
    for name, convolution, copies in (
        ("plain convolutions", nn.Conv2d, 0),
        ("standardised", StandardisedConv2d, 0),
        (f"standardised, {COPIES} copies of an image", StandardisedConv2d, COPIES),
    ):
        accuracy, epsilon = train(convolution, copies, options.steps)
        print(f"{name}: test accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = {DELTA}", flush=True)


if __name__ == "__main__":
    main()
