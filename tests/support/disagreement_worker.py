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
SECOND_PASSES = (("DDP", ""), ("FSDP2", ""), ("TP", "features"), ("TP", "positions"))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x, mask=None):
        return self.inner(x if mask is None else x * mask)


def case(wrapper):
    if wrapper == "TP":
        return tp_worker.case()
    torch.manual_seed(0)
    return Masked(), torch.randn(6, 12), torch.randint(0, 5, (6,))


def losses_of(model, x, y, **inputs):
    return nn.functional.cross_entropy(model(x, **inputs), y, reduction="none")


def losses(wrapper):
    return tp_worker.losses if wrapper == "TP" else losses_of


class Step:
    def __init__(self, wrapper, frozen=False, how="positions", **options):
        self.model, self.x, self.y = case(wrapper)
        if wrapper == "TP":
            self.layer = tp_worker.parallel(self.model, how).blocks[0].n1  # whose gradients are summed
        else:
            self.layer = self.model.inner[0]
        self.layer.requires_grad_(not frozen)
        if wrapper == "FSDP2":
            fully_shard(self.model.inner[0])
            fully_shard(self.model)
        self.module = dpfast.GradSampleModuleFastGradientClipping(self.model, **{"max_grad_norm": C, **options})
        self.call = DDP(self.module) if wrapper == "DDP" else self.module
        self.losses = losses(wrapper)

    def __call__(self, **inputs):
        self.call.zero_grad()
        self.losses(self.call, self.x, self.y, **inputs).mean().backward()

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


def second_pass_of_another_loss(wrapper, how):
    """On the first rank. What the rank is told, and the gradients of a right step after it."""
    step = Step(wrapper, how=how, loss_reduction="sum", passes=2)

    def two_passes(sign):
        step.call.zero_grad()
        own = step.losses(step.call, step.x, step.y)
        own.sum().backward(retain_graph=True)
        factors = step.module.get_clipping_coef()
        step.module.disable_hooks()
        try:
            (sign * factors * own).sum().backward()
        finally:
            step.module.enable_hooks()

    error = attempt(two_passes, -1.0 if first() else 1.0)
    untouched = not any(p.grad is not None and p.grad.any() for p in step.model.parameters())
    if wrapper != "FSDP2":  # which does not recover from a failed pass
        two_passes(1.0)
    return error, untouched, step.gradients() if wrapper != "FSDP2" else {}


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
    for wrapper, how in SECOND_PASSES:
        found[wrapper, how, "second pass"] = attempt(second_pass_of_another_loss, wrapper, how)
    found["FSDP2", "units"] = attempt(sharded_otherwise)
    found["on all"] = attempt(unfrozen_and_frozen_on_all)
    return found


if __name__ == "__main__":
    rank_main(main)
