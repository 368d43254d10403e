"""One rank of tests/distributed/test_disagreement.py: ranks that do not have the same settings, or train the same."""

from functools import partial

import torch
import torch.distributed as dist
import tp_worker
from cases import Mlp
from processes import attempt, rank_main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dpfast

C = 0.5
WRAPPERS = ("DDP", "FSDP2", "TP")
OPTIONS = {
    "nothing": ({}, {}),
    "max_grad_norm": ({"max_grad_norm": C}, {"max_grad_norm": 2 * C}),
    "clipper": ({"norm_clipper": lambda: dpfast.ConstantPerLayerClipper(C)}, {}),
    "gamma": tuple({"norm_clipper": partial(dpfast.AutomaticClipper, C, gamma)} for gamma in (0.1, 0.2)),
    "reduction": ({"loss_reduction": "mean"}, {"loss_reduction": "sum"}),
}
"""Of the first rank and of the others."""


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x, mask=None):
        return self.inner(x if mask is None else x * mask)


class Step:
    def __init__(self, wrapper, frozen=False, **options):
        torch.manual_seed(0)
        if wrapper == "TP":
            self.model, self.x, self.y = tp_worker.case()
            self.layer = tp_worker.parallel(self.model, "positions").blocks[0].n1  # whose gradients are summed
        else:
            self.model, self.x, self.y = Masked(), torch.randn(6, 12), torch.randint(0, 5, (6,))
            self.layer = self.model.inner[0]
        self.layer.requires_grad_(not frozen)
        if wrapper == "FSDP2":
            fully_shard(self.model.inner[0])
            fully_shard(self.model)
        module = dpfast.GradSampleModuleFastGradientClipping(self.model, **{"max_grad_norm": C, **options})
        self.call = DDP(module) if wrapper == "DDP" else module
        self.losses = tp_worker.losses if wrapper == "TP" else None

    def __call__(self, **inputs):
        self.call.zero_grad()
        if self.losses is not None:
            return self.losses(self.call, self.x, self.y).mean().backward()
        return nn.functional.cross_entropy(self.call(self.x, **inputs), self.y).backward()

    def gradients(self):
        whole = {
            name: getattr(p.grad, "full_tensor", lambda g=p.grad: g)()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        return {name: g.clone() for name, g in whole.items()}


def first():
    return dist.get_rank() == 0


def with_options(wrapper, what):
    options = OPTIONS[what][0 if first() else 1]
    Step(wrapper, **{name: value() if callable(value) else value for name, value in options.items()})()


def with_thresholds(wrapper):
    """As large together."""
    step = Step(wrapper)
    values = [C] * sum(p.requires_grad for p in step.model.parameters())
    values[0 if first() else 1] = 2 * C
    Step(wrapper, norm_clipper=dpfast.ConstantPerLayerClipper(values))()


def trains_other(wrapper, when):
    step = Step(wrapper, frozen=first() if when == "from the first step on" else when == "unfrozen later")
    if when != "from the first step on":
        step()
        if first():
            step.layer.requires_grad_(when == "unfrozen later")
    step()


def called_otherwise(wrapper):
    step = Step(wrapper)
    step(**({"mask": torch.ones_like(step.x)} if first() else {}))


def sharded_otherwise():
    """Units of as many numbers, so that FSDP2 itself does not notice."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))
    fully_shard(model[0 if first() else 1])
    fully_shard(model)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    wrapped(torch.randn(6, 12)).square().sum(1).mean().backward()


def unfrozen_and_frozen_on_all():
    """Gradients of three steps, of which the second trains a layer more."""
    step, found = Step("FSDP2", frozen=True), []
    for trains in (False, True, False):
        step.layer.requires_grad_(trains)
        step()
        found.append(step.gradients())
    return found


def main():
    found = {}
    for wrapper in WRAPPERS:
        found[wrapper] = attempt(with_options, wrapper, "nothing")
        for what in [what for what in OPTIONS if what != "nothing"]:
            found[wrapper, what] = attempt(with_options, wrapper, what)
        found[wrapper, "thresholds"] = attempt(with_thresholds, wrapper)
        if wrapper != "TP":
            found[wrapper, "keys"] = attempt(called_otherwise, wrapper)
        for when in ("from the first step on", "frozen later", "unfrozen later"):
            if wrapper == "FSDP2" or (wrapper, when) in (("DDP", "frozen later"), ("TP", "from the first step on")):
                found[wrapper, when] = attempt(trains_other, wrapper, when)
    found["FSDP2", "units"] = attempt(sharded_otherwise)
    found["on all"] = attempt(unfrozen_and_frozen_on_all)
    return found


if __name__ == "__main__":
    rank_main(main)
