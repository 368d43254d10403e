"""One rank of tests/distributed/test_ddp.py: the sums, the errors and the numbers of collectives under DDP."""

import contextlib
from collections import Counter
from functools import partial

import torch
import torch._dynamo
import torch.distributed as dist
from cases import Mlp, Tied, Transformer
from processes import attempt, rank_main
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dpfast

N, C = 8, 0.5
SPLITS = {"equal": 4, "unequal": 5, "empty": 8}
WAYS = {
    "as it is": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "bucket views": {"gradient_as_bucket_view": True},
    "many bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "find unused": {"find_unused_parameters": True},
}
COUNT = Counter()


def case(kind, dtype=torch.float32):
    torch.manual_seed(0)
    if kind == "channels last":
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 5))
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        return model, torch.randn(N, 3, 6, 6), torch.randint(0, 5, (N,))
    if kind == "mlp":
        return Mlp().to(dtype), torch.randn(N, 12).to(dtype), torch.randint(0, 5, (N,))
    model = (Tied() if kind == "tied" else Transformer()).to(dtype)
    return model, torch.randint(1, 30, (N, 6)), torch.randint(0, 5, (N,))


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def wrapped(model, order="outside", passes=1, clipper=None, threshold=C, reduction="sum", **ddp):
    """(what to call, the dpfast module, the DDP)."""
    options = {"max_grad_norm": threshold, "loss_reduction": reduction, "passes": passes, "norm_clipper": clipper}
    if order == "outside":
        module = dpfast.GradSampleModuleFastGradientClipping(model, **options)
        ddp = DDP(module, **ddp)
        return ddp, module, ddp
    ddp = DDP(model, **ddp)
    module = dpfast.GradSampleModuleFastGradientClipping(ddp, **options)
    return module, module, ddp


def part(x, split="equal"):
    cut = SPLITS[split]
    return x[:cut] if dist.get_rank() == 0 else x[cut:]


def counted(tensor, *args, _all_reduce=dist.all_reduce, **options):
    COUNT["calls"] += 1
    COUNT["bytes"] += tensor.nbytes
    return _all_reduce(tensor, *args, **options)


dist.all_reduce = counted


def sums(kind, split="equal", steps=1, accumulate=None, zero=True, dtype=torch.float32, passes=1, **how):
    """{name: p.grad} after some steps; all of them on the same batch, so that each leaves the same."""
    model, x, y = case(kind, dtype)
    call, module, ddp = wrapped(model, passes=passes, **how)
    x, y = part(x, split), part(y, split)
    for _ in range(steps):
        COUNT.clear()
        if zero:
            call.zero_grad(set_to_none=zero is True)
        if accumulate is not None:
            with ddp.no_sync() if accumulate == "no_sync" else contextlib.nullcontext():
                losses(call, x[:2], y[:2]).sum().backward()
            rest = slice(2, None)
        else:
            rest = slice(None)
        own = losses(call, x[rest], y[rest])
        if how.get("reduction") == "mean":
            own.mean().backward()
        elif passes == 1:
            own.sum().backward()
        else:
            own.sum().backward(retain_graph=True)
            call.zero_grad()
            factors = module.get_clipping_coef()
            module.disable_hooks()
            (factors * own).sum().backward()
            module.enable_hooks()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, len(module.get_norm_sample()), dict(COUNT)


def plain(kind, **ddp):
    """{"calls", "bytes"} of plain DDP's buckets."""
    model, x, y = case(kind)
    ddp = DDP(model, **ddp)
    counts = Counter()

    def hook(state, bucket):
        counts["calls"] += 1
        counts["bytes"] += bucket.buffer().nbytes
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        counts.clear()
        losses(ddp, part(x), part(y)).sum().backward()
    return dict(counts)


class Skips(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.skipped = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x):
        return self.used(x)


class Functional(Skips):
    def forward(self, x):
        return self.used(x) + torch.cdist(x, self.skipped.weight) + self.skipped(x)


def backward(model, order="outside", cls=dpfast.GradSampleModuleFastGradientClipping, threshold=C, **ddp):
    """{name: p.grad} after one backward pass."""
    torch.manual_seed(0)
    x, y = part(torch.randn(N, 12)), part(torch.randint(0, 5, (N,)))
    options = {"max_grad_norm": threshold} if cls is not dpfast.GradSampleModule else {}
    if order == "outside":
        call = DDP(cls(model, loss_reduction="sum", **options), **ddp)
    else:
        call = cls(DDP(model, **ddp), loss_reduction="sum", **options)
    losses(call, x, y).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def disagreement():
    """The error, and whether p.grad is None or what it was before (zeros of DDP's making)."""
    model = Mlp()
    error = attempt(backward, model, threshold=C * (1 + dist.get_rank()))
    return error, all(p.grad is None or not p.grad.any() for p in model.parameters())


def accumulated_in_two_passes(order):
    """The last rank has no samples in any of two parts, of which the last crosses the ranks."""
    model, x, y = case("mlp")
    call, module, ddp = wrapped(model, order, passes=2)
    x, y = part(x, "empty"), part(y, "empty")
    for some, sync in ((slice(0, 3), ddp.no_sync()), (slice(3, None), contextlib.nullcontext())):
        with sync:
            own = losses(call, x[some], y[some])
            own.sum().backward(retain_graph=True)
            factors = module.get_clipping_coef()
            module.disable_hooks()
            (factors * own).sum().backward()
            module.enable_hooks()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def no_sync_after_sync():
    model, x, y = case("mlp")
    call, _, ddp = wrapped(model)
    losses(call, part(x), part(y)).sum().backward()
    with ddp.no_sync():
        losses(call, part(x), part(y)).sum().backward()


def other_ranks_than_before(order):
    """Sums of one rank and of both in one ``p.grad``: (past DDP, in it) or the other way round."""
    model, x, y = case("mlp")
    call, module, _ = wrapped(model)
    for run in (module, call)[::order]:
        losses(run, part(x), part(y)).sum().backward()


def passes_differ():
    model, x, y = case("mlp")
    call, _, ddp = wrapped(model)
    if dist.get_rank() == 0:
        with ddp.no_sync():
            losses(call, part(x), part(y)).sum().backward()
    losses(call, part(x), part(y)).sum().backward()


def python_reducer():
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        return backward(Mlp(), "inside")
    finally:
        torch._dynamo.config.optimize_ddp = True


def frozen_later():
    """The gradients of what is still trainable."""
    model, x, y = case("mlp")
    call, _, _ = wrapped(model)
    for _ in range(2):
        call.zero_grad()
        losses(call, part(x), part(y)).sum().backward()
        model[0].weight.requires_grad = False
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def other_trainable():
    model = nn.ModuleDict({"a": Mlp(), "b": nn.Linear(5, 5)})
    model["a"] = dpfast.GradSampleModuleFastGradientClipping(model["a"])
    model.forward = lambda x: model["b"](model["a"](x))
    losses(DDP(model), torch.randn(4, 12), torch.zeros(4).long()).sum().backward()


def with_hook():
    module = dpfast.GradSampleModuleFastGradientClipping(Mlp())
    ddp = DDP(module)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    ddp(torch.randn(4, 12))


def nested():
    model = nn.Sequential(nn.Linear(12, 12), DDP(Mlp()))
    dpfast.GradSampleModuleFastGradientClipping(model)(torch.randn(4, 12))


def hooks_off():
    """Ordinary gradients as DDP gives them, hooks switched off before the forward or behind it; then a private step."""
    found = []
    for before in (True, False):
        model, x, y = case("mlp")
        call, module, _ = wrapped(model)
        if before:
            module.disable_hooks()
        loss = losses(call, part(x), part(y)).sum()
        module.disable_hooks()
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    module.enable_hooks()
    call.zero_grad()
    loss = losses(call, part(x), part(y)).sum()
    with torch.no_grad():  # an evaluation between forward and backward
        call(x)
    loss.backward()
    return [*found, {name: p.grad.clone() for name, p in model.named_parameters()}]


def fsdp1(order, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model, device = Mlp(), torch.device("cpu")
    if order == "inside":
        call = dpfast.GradSampleModuleFastGradientClipping(FSDP(model, device_id=device, **options))
    else:
        call = FSDP(dpfast.GradSampleModuleFastGradientClipping(model), device_id=device, **options)
    losses(call, torch.randn(4, 12), torch.zeros(4).long()).sum().backward()


def joined():
    """Ranks with different numbers of batches (Join): each batch's sum crosses the ranks that are left."""
    model, x, y = case("mlp")
    call, _, ddp = wrapped(model)
    found = []
    with ddp.join():
        for _ in range(1 + dist.get_rank()):
            call.zero_grad()
            losses(call, part(x), part(y)).sum().backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def main():
    found = {}
    for order in ("outside", "inside"):
        for way, ddp in WAYS.items():
            found[order, way] = attempt(sums, "tied", order=order, steps=3, **ddp)
            for accumulate in ("no_sync", "sync"):
                found[order, way, accumulate] = attempt(
                    sums, "tied", order=order, steps=2, accumulate=accumulate, **ddp
                )
            found[order, way, "channels last"] = attempt(sums, "channels last", order=order, steps=3, **ddp)
            found[order, way, "added up"] = attempt(sums, "mlp", order=order, steps=3, zero=False, **ddp)
        for split in SPLITS:
            found[order, split] = attempt(sums, "transformer", order=order, split=split, steps=2)
        for passes in (1, 2):
            found[order, "zeroed", passes] = attempt(sums, "mlp", order=order, steps=3, zero="in place", passes=passes)
        found[order, "per layer"] = attempt(sums, "tied", order=order, clipper=dpfast.ConstantPerLayerClipper(C))
        found[order, "two passes"] = attempt(sums, "transformer", order=order, steps=3, passes=2)
        found[order, "two passes, parts, empty"] = attempt(accumulated_in_two_passes, order)
        found[order, "mean"] = attempt(sums, "mlp", order=order, split="unequal", reduction="mean")
        found[order, "bf16"] = attempt(sums, "mlp", order=order, dtype=torch.bfloat16, steps=2)
        found[order, "fp64"] = attempt(sums, "mlp", order=order, dtype=torch.float64, steps=2)
        found[order, "unused"] = attempt(backward, Skips(), order)
        two_passes = partial(dpfast.GradSampleModuleFastGradientClipping, passes=2)
        found[order, "unused, two passes"] = attempt(backward, Skips(), order, two_passes)
        found[order, "unused, found"] = attempt(backward, Skips(), order, find_unused_parameters=True)
        found[order, "functional"] = attempt(backward, Functional(), order)
        found[order, "materialized"] = attempt(backward, Mlp(), order, dpfast.GradSampleModule)
        found[order, "static"] = attempt(backward, Mlp(), order, static_graph=True)
        for originals in (False, True):
            found["fsdp1", order, originals] = attempt(fsdp1, order, use_orig_params=originals)
    found["plain"] = {way: plain("tied", **ddp) for way, ddp in WAYS.items()}
    found["disagreement"] = disagreement()
    found["frozen later"] = attempt(frozen_later)
    found["mixed"] = attempt(no_sync_after_sync)
    found["past DDP first"] = attempt(other_ranks_than_before, 1)
    found["past DDP then"] = attempt(other_ranks_than_before, -1)
    found["passes differ"] = attempt(passes_differ)
    found["python reducer"] = attempt(python_reducer)
    found["other trainable"] = attempt(other_trainable)
    found["hook"] = attempt(with_hook)
    found["nested"] = attempt(nested)
    found["hooks off"] = attempt(hooks_off)
    found["joined"] = attempt(joined)
    return found


if __name__ == "__main__":
    rank_main(main)
