"""Opacus's engine with dpfast's clipping: the script of an Opacus user, with one import changed.

    python examples/opacus_engine.py [--epochs 8]

A convolutional network on the handwritten digits of scikit-learn, trained to ε = 8. `make_private_with_epsilon` finds
the noise, deals out Poisson batches and counts what they cost; `BatchMemoryManager` splits large draws. Trains once
more with Opacus's own hooks, the same seeds and the same noise, and says how far apart the two models end.
"""

import argparse
import warnings

import torch
import torch.nn.functional as F
from _digits_models import digits
from opacus import PrivacyEngine as OpacusEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from dpfast.opacus import PrivacyEngine  # the one line

EPSILON, DELTA, BATCH_SIZE, LARGEST = 8.0, 1e-4, 128, 64


def network() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def train(engine, epochs: int):
    """Returns the model, its accuracy and ε."""
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = network()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(train_set, batch_size=BATCH_SIZE),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=LARGEST, optimizer=optimizer) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    x, y = test_set.tensors
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    return model, accuracy, engine.get_epsilon(DELTA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    warnings.filterwarnings("ignore", module="opacus|torch")
    torch.set_num_threads(1)
    weights = []
    for name, engine in (("dpfast", PrivacyEngine(accountant="rdp")), ("Opacus", OpacusEngine(accountant="rdp"))):
        model, accuracy, epsilon = train(engine, epochs)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        print(f"{name}: test accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = {DELTA}", flush=True)
    apart = (weights[0] - weights[1]).norm() / weights[1].norm()
    print(f"the two models' weights differ by {apart:.0e} of their norm")


if __name__ == "__main__":
    main()
