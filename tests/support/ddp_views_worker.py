"""One rank of tests/distributed/test_ddp_views.py: training with and without ``gradient_as_bucket_view``, in which DDP
puts tensors of its own in the place of ``p.grad``, and hands the same ones out again."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from ddp_worker import wrapped
from processes import attempt, rank_main
from torch import nn

from dpfast.distributed import SharedSecret
from dpfast.opacus import DPOptimizerFast

C, STEPS = 0.5, 4
WAYS = {  # which of a step's backward passes are under no_sync, and which are parts of a virtual step
    "plain": ([True], []),
    "two passes a step": ([True, True], []),
    "the first one under no_sync": ([False, True], []),
    "virtual steps": ([True, True, True], [True, True, False]),
}


def train(order, views, way, to_none, passes):
    """Parameters after some steps without noise; also (passes that the notes tell of)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    call, module, ddp = wrapped(net, order, passes=passes, gradient_as_bucket_view=views)
    optimizer = DPOptimizerFast(
        torch.optim.SGD(net.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=4,
        secret=SharedSecret.agreed(),
    )
    torch.manual_seed(5 + dist.get_rank())
    synchronised, skipped = WAYS[way]
    counts = []

    def backward():
        losses = call(torch.randn(2, 3)).square().sum(1)
        losses.sum().backward(retain_graph=passes == 2)
        if passes == 2:
            module.disable_hooks()
            (module.get_clipping_coef() * losses).sum().backward()
            module.enable_hooks()

    for _ in range(STEPS):
        for i, crosses in enumerate(synchronised):
            with contextlib.nullcontext() if crosses else ddp.no_sync():
                backward()
            if skipped:
                optimizer.signal_skip_step(do_skip=skipped[i])
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        if not skipped:
            optimizer.attach_step_hook(lambda of: counts.append(of.accumulated_iterations))
            optimizer.step()
            call.zero_grad(set_to_none=to_none)
            optimizer.zero_grad(set_to_none=to_none)
    return torch.cat([p.detach().flatten() for p in net.parameters()]), counts


def without_a_note(order):
    """A gradient that nobody tells of, on one rank."""
    net = nn.Linear(3, 2)
    call, _, _ = wrapped(net, order)
    if dist.get_rank() == 0:
        net.weight.grad = torch.ones(2, 3)
    call(torch.randn(2, 3)).sum().backward()


def replaced_later(order, views, when):
    """A sum is replaced on one rank, before the second forward or behind it, or before the third."""
    net = nn.Linear(3, 2)
    call, _, _ = wrapped(net, order, gradient_as_bucket_view=views)

    def replace():
        if dist.get_rank() == 0:
            net.bias.grad = 100 * net.bias.grad

    for _ in range(2 if when == "before the third" else 1):
        call(torch.randn(2, 3)).sum().backward()
    if when != "behind":
        replace()
    found = call(torch.randn(2, 3)).sum()
    if when == "behind":
        replace()
    found.backward()


def main():
    found = {}
    for order in ("outside", "inside"):
        for way in WAYS:
            for to_none in (True, False):
                for passes in (1, 2):
                    run = partial(train, order, way=way, to_none=to_none, passes=passes)
                    found[order, way, to_none, passes] = [attempt(run, views=views) for views in (False, True)]
    for order in ("outside", "inside"):
        found[order, "no note"] = attempt(without_a_note, order)
        for views in (False, True):
            for when in ("before", "behind", "before the third"):
                found[order, "replaced", views, when] = attempt(replaced_later, order, views, when)
    return found


if __name__ == "__main__":
    rank_main(main)
