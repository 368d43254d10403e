"""Privacy of persons, who have several records each: drawn as persons, clipped as persons, counted as persons.

    python examples/users.py [--steps 150]

The handwritten digits of scikit-learn, dealt out to made-up writers, of whom some have one scan and some ten.
`UnitPoissonSampler` draws writers, `model.units(ids)` clips all that a writer has as one, and ε is for a writer with
all of their scans. Beside it, the same noise for single scans: that ε is for one scan, and says little of a writer with
ten.
"""

import argparse

import torch
import torch.nn.functional as F
from _digits_models import digits
from opacus.accountants import RDPAccountant

import dpfast
from dpfast.opacus import DPOptimizerFast

RATE, SIGMA, MAX_GRAD_NORM, DELTA = 0.2, 2.0, 1.0, 1e-4
WRITERS = 400


def train(writer_of_scan: torch.Tensor, steps: int) -> tuple[float, float, int]:
    """Whose each scan is says what is protected. Returns accuracy, ε and how many units there are."""
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = (some.tensors for some in digits())
    sampler = dpfast.UnitPoissonSampler(writer_of_scan, RATE)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=MAX_GRAD_NORM)
    optimizer = DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.5),
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=RATE * sampler.num_units,
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=RATE))
    for step in range(steps):
        scans = torch.tensor(sampler.batch(step), dtype=torch.long)
        writers, ids = writer_of_scan[scans].unique(return_inverse=True)  # of this draw, numbered from 0
        optimizer.zero_grad()
        with model.units(ids, len(writers), per_unit="mean"):
            F.cross_entropy(model(x[scans]), y[scans]).backward()
        optimizer.step()
    accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    return accuracy, accountant.get_epsilon(DELTA), sampler.num_units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scans = len(digits()[0])
    weights = torch.rand(WRITERS, generator=torch.Generator().manual_seed(0)) ** 2 + 0.1
    writers = weights.multinomial(scans, replacement=True, generator=torch.Generator().manual_seed(1))
    counts = writers.bincount(minlength=WRITERS)
    print(f"{scans} scans of {int((counts > 0).sum())} writers, who have {int(counts[counts > 0].min())} to "
          f"{int(counts.max())} each")  # fmt: skip
    for name, whose in (("a writer with all their scans", writers), ("one scan", torch.arange(scans))):
        accuracy, epsilon, units = train(whose, options.steps)
        print(
            f"protects {name} ({units} units): test accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = {DELTA}",
            flush=True,
        )


if __name__ == "__main__":
    main()
