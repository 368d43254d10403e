"""One rank of tests/distributed/test_frozen_between_passes.py: parameters that some passes leave out."""

import torch
import torch.distributed as dist
from processes import attempt, rank_main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dpfast
from dpfast.modes import held_by

C, RANKS = 0.5, 2
KINDS = ("DDP", "views", "FSDP2")
WAYS = {  # passes: whether it crosses ranks, which layer is frozen in it, and which is cleared after it
    "in one that crosses": [(False, "", ""), (True, "0", ""), (True, "", "")],
    "in one that does not": [(False, "", ""), (False, "0", ""), (True, "", "")],
    "after a step of a part": [(True, "", "0"), (False, "2", ""), (True, "", "")],
    "a part in each step": [(True, "", "0"), (True, "", "0"), (True, "", "")],
    "given up since": [(False, "", "0"), (True, "0", ""), (True, "", "")],
    "mixed": [(False, "", ""), (True, "0", ""), (False, "", "")],
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def data(seed, rank):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(2, 6, generator=generator) * 5, torch.randint(0, 3, (2,), generator=generator)


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def accumulated(kind, way, to_none):
    """({name: p.grad}, {layer: passes that its gradients hold})."""
    model = net()
    if kind == "FSDP2":
        fully_shard(model[0])
        fully_shard(model)
    call = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    if kind != "FSDP2":
        call = ddp = DDP(call, find_unused_parameters=True, gradient_as_bucket_view=kind == "views")
    for seed, (crosses, frozen, cleared) in enumerate(WAYS[way]):
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or not name.startswith(frozen))
        if kind == "FSDP2":
            model.set_requires_gradient_sync(crosses)
        else:
            ddp.require_backward_grad_sync = crosses
        losses(call, *data(seed, dist.get_rank())).sum().backward()
        if cleared:
            model[int(cleared)].zero_grad(set_to_none=to_none)
    whole = {name: getattr(p.grad, "full_tensor", p.grad.clone)() for name, p in model.named_parameters()}
    return whole, {layer: held_by(model[layer].parameters()).passes for layer in (0, 2)}


def main():
    cases = [(kind, way, to_none) for kind in KINDS for way in WAYS for to_none in (True, False)]
    return {case: attempt(accumulated, *case) for case in cases if case[0] != "views" or not case[2]}


if __name__ == "__main__":
    rank_main(main)
