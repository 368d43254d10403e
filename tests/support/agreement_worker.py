"""One rank of tests/opacus/test_agreement.py: what optimizers of different ranks must have alike."""

import contextlib

import torch
import torch.distributed as dist
from cases import Mlp
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from processes import attempt, rank_main
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dpfast
from dpfast.distributed import SharedSecret
from dpfast.opacus import DPOptimizerFast, OnePassOptimizer
from dpfast.opacus.bound_optimizers import DistributedOnePassOptimizer

C, SIGMA, SIZE = 0.5, 1.0, 4
OF_RANKS = {
    "the same": {},
    "passes": {},
    "noise multiplier": {"noise_multiplier": 2 * SIGMA},
    "batch size": {"expected_batch_size": SIZE},
    "threshold": {"max_grad_norm": 2 * C},
}
"""What the second rank has."""


def data():
    torch.manual_seed(0)
    return Mlp(), torch.randn(6, 12), torch.randint(0, 5, (6,))


def of_opacus(what):
    """Opacus's DPDDP: a step of each rank's half."""
    model, x, y = data()
    own = slice(dist.get_rank(), None, 2)
    module = dpfast.GradSampleModuleFastGradientClipping(DPDDP(model), max_grad_norm=C)
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "expected_batch_size": SIZE / 2}
    options.update(OF_RANKS[what] if dist.get_rank() else {})
    optimizer = DistributedOnePassOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        module=module,
        generator=torch.Generator().manual_seed(5),
        **options,
    )
    steps = []
    optimizer.attach_step_hook(lambda _: steps.append(1))
    for _ in range(2 if what == "passes" and dist.get_rank() == 0 else 1):
        nn.functional.cross_entropy(module(x[own]), y[own]).backward()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    finally:  # nothing is released or accounted for
        changed = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        if what != "the same" and (steps or changed):
            raise AssertionError("released")


def of_no_sync(cls):
    """The second rank's first pass is clipped to more."""
    model, x, y = data()
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    ddp = DDP(module)
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "expected_batch_size": 6, "loss_reduction": "sum"}
    if cls is OnePassOptimizer:
        options["module"] = module
    optimizer = cls(torch.optim.SGD(model.parameters(), lr=0.1), secret=SharedSecret(bytes(range(32))), **options)
    module.max_grad_norm = C * (1 + 4 * dist.get_rank())
    for context in (ddp.no_sync(), contextlib.nullcontext()):
        with context:
            nn.functional.cross_entropy(ddp(x), y, reduction="sum").backward()
        module.max_grad_norm = C
    optimizer.step()


def of_a_group_each(of_group):
    """Two trainings, one a rank; returns the noise."""
    model, x, y = data()
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    ddp = DDP(module, process_group=own)
    optimizer = DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        expected_batch_size=6,
        loss_reduction="sum",
        secret=SharedSecret.agreed(group=own) if of_group else SharedSecret.agreed(),
    )
    nn.functional.cross_entropy(ddp(x), y, reduction="sum").backward()
    exact = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), exact, strict=True)])


def main():
    found = {what: attempt(of_opacus, what) for what in OF_RANKS}
    for cls in (DPOptimizerFast, OnePassOptimizer):
        found["no_sync", cls.__name__] = attempt(of_no_sync, cls)
    found["one secret"] = attempt(of_a_group_each, False)
    found["secrets"] = attempt(of_a_group_each, True)
    return found


if __name__ == "__main__":
    rank_main(main)
