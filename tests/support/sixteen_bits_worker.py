"""One rank of tests/distributed/test_sums_of_16_bits.py: what an optimizer takes of a model in 16 bits."""

import contextlib

import torch
import torch.distributed as dist
from ddp_worker import wrapped
from processes import attempt, rank_main
from torch import nn
from torch.distributed.fsdp import fully_shard

import dpfast
from dpfast.distributed import SharedSecret, local
from dpfast.opacus import DPOptimizerFast

C, N = 1.0, 400
WAYS = {  # which of a step's backward passes are under no_sync
    "plain": [True],
    "two passes a step": [True, True],
    "the first one under no_sync": [False, True],
}


class Takes(DPOptimizerFast):
    def add_noise(self):
        self.taken = torch.cat([local(p.summed_grad).double().flatten() for p in self.params])
        self.kinds = {(type(p.summed_grad), p.summed_grad.dtype) for p in self.params}
        super().add_noise()


def taken(dtype, synchronised, wrap, passes=1):
    """(this rank's part of the sums of steps of N, N - 1, ... samples, their types)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    call, module, without_sync = wrap(net)
    optimizer = Takes(
        torch.optim.SGD(net.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=1,
        loss_reduction="sum",
        secret=SharedSecret.agreed(),
    )
    rows = torch.tensor([3.0, 1.0, 2.0]) + 0.1 * torch.randn(N, 3)
    found = []
    for n in range(N, N - 6, -1):
        own = rows[:n][dist.get_rank() :: 2].to(dtype)
        for crosses, part in zip(synchronised, own.tensor_split(len(synchronised)), strict=True):
            with contextlib.nullcontext() if crosses else without_sync():
                losses = call(part).sum(1)
                losses.sum().backward(retain_graph=passes == 2)
                if passes == 2:
                    module.disable_hooks()
                    (module.get_clipping_coef() * losses).sum().backward()
                    module.enable_hooks()
        optimizer.step()
        optimizer.zero_grad()
        found.append(optimizer.taken)
    return torch.stack(found), optimizer.kinds


def ddp(net, **options):
    call, module, parallel = wrapped(net, "outside", threshold=C, **options)
    return call, module, parallel.no_sync


def fsdp(net):
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    module = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum")

    @contextlib.contextmanager
    def without_sync():
        net.set_requires_gradient_sync(False)
        yield
        net.set_requires_gradient_sync(True)

    return module, module, without_sync


def main():
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        for way, synchronised in WAYS.items():
            found["DDP", way, dtype] = attempt(taken, dtype, synchronised, ddp)
            found["DDP with views", way, dtype] = attempt(
                taken, dtype, synchronised, lambda net: ddp(net, gradient_as_bucket_view=True)
            )
            found["DDP in two passes", way, dtype] = attempt(
                taken, dtype, synchronised, lambda net: ddp(net, gradient_as_bucket_view=True, passes=2), passes=2
            )
            found["FSDP2", way, dtype] = attempt(taken, dtype, synchronised, fsdp)
    return found


if __name__ == "__main__":
    rank_main(main)
