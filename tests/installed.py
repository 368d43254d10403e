"""Trains on the CPU with the dpfast that is installed, and nothing but what it requires: `make dist` runs it.

python -I tests/installed.py        # neither Opacus nor NumPy nor scikit-learn may be needed
"""

import importlib
import importlib.metadata
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402  after the filter

import dpfast  # noqa: E402

OPTIONAL = ("opacus", "numpy", "sklearn", "scipy", "transformers", "matplotlib")


def missing(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return True
    return False


def clipped_loop(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, bound: float) -> list[torch.Tensor]:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for n in range(len(x)):
        loss = torch.nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        factor = (bound / torch.stack([g.norm() for g in gradients]).norm()).clamp(max=1.0)
        total = [t + factor * g for t, g in zip(total, gradients, strict=True)]
    return total


def main() -> None:
    there = [name for name in OPTIONAL if not missing(name)]
    assert not there, f"{there} can be imported: this says nothing about an empty environment"
    assert importlib.metadata.version("dpfast") == dpfast.__version__
    torch.manual_seed(0)
    y = torch.randint(0, 3, (256,))
    x = 2 * torch.randn(3, 1, 8, 8)[y] + torch.randn(256, 1, 8, 8)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.GroupNorm(2, 8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 3),
    )
    expected = clipped_loop(net, x[:8], y[:8], 0.5)
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=0.5)
    torch.nn.functional.cross_entropy(model(x[:8]), y[:8]).backward()
    for p, total in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, total, rtol=1e-4, atol=1e-5)
    for _ in range(30):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.5 * (p.grad + 0.5 * torch.randn_like(p)) / len(x)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy > 0.9, accuracy
    python = sys.version.split()[0]
    print(f"dpfast {dpfast.__version__} of {dpfast.__path__[0]}, torch {torch.__version__}, Python {python}")
    print(f"trained on the CPU with nothing else installed: accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
