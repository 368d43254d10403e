"""One rank of tests/distributed/test_in_turn.py: large layers under DDP, which are taken in turn, and under FSDP2."""

import torch
import torch.distributed as dist
from in_turn import everything_in_turn
from processes import attempt, rank_main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dpfast

C, CUT = 0.2, 4  # of six samples the first rank has four


def case():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(40), nn.Linear(40, 72), nn.Tanh(), nn.Linear(72, 40, bias=False), nn.Linear(40, 3)
    )
    return model, torch.randn(6, 20, 40), torch.randint(3, (6,))


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x).mean(1), y, reduction="none")


def wrapped(model, inside):
    if inside == "FSDP2":
        fully_shard(model)
    model = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    return DDP(model) if inside == "DDP" else model


def step(inside, write=False):
    """(p.grad by name, norms, how many parameters were taken in turn) of two passes of which the second adds."""
    model, x, y = case()
    part = slice(None, CUT) if dist.get_rank() == 0 else slice(CUT, None)
    parameters = dict(model.named_parameters())
    if write and dist.get_rank() == 1:  # into what waits, on one rank
        seen = []
        model[3].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
        model[1].register_forward_hook(
            lambda module, inputs, output: output.register_hook(lambda g: (seen[-1].mul_(2.0), g)[1]) and None
        )
    with everything_in_turn() as taken:
        private = wrapped(model, inside)
        for _ in range(2):
            losses(private, x[part], y[part]).sum().backward()
    inner = private.module if inside == "DDP" else private
    parameters = dict(inner._module.named_parameters())
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in parameters.items()}
    return whole, inner.get_norm_sample(), list(taken)


def main():
    return {
        "DDP": step("DDP"),
        "FSDP2": step("FSDP2"),
        "written": attempt(step, "DDP", write=True),
    }


if __name__ == "__main__":
    rank_main(main)
