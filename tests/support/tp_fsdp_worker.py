"""One rank of the four of tests/distributed/test_fsdp_and_tensor_parallel.py: two parts of the samples (FSDP2), and two
of each parameter."""

import fsdp_worker  # which counts collectives
import torch
import torch.distributed as dist
from processes import attempt, rank_main
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset
from tp_worker import HOW, C, backward, case, losses, parallel, whole, wrapped

import dpfast
import dpfast.opacus
from dpfast.distributed import PoissonBatches, SharedSecret

SPLITS = {"equal": 3, "unequal": 4, "one": 6}
FROZEN = ("norm", "q.weight", "o.bias", "n2")


def grid(*shape):
    """(data parallel axis or axes, tensor parallel axis)."""
    shape = shape or (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards", "parts")[-len(shape) :])
    return mesh[("copies", "shards")] if len(shape) == 3 else mesh["shards"], mesh["parts"]


def part(x, split="equal"):
    cut = SPLITS[split]
    return x[:cut] if dist.get_rank() < 2 else x[cut:]


def shard(model, rows, around=None, layers=False, **options):
    """``layers``: each by itself too."""
    for block in model.blocks:
        for layer in block.children() if layers else ():
            fully_shard(layer, mesh=rows, **options)
        fully_shard(block, mesh=rows, **options)
    fully_shard(model if around is None else around, mesh=rows, **options)


def built(how="features", order="before", shape=(), change=None, model=None, sharding=None, **options):
    """(model, wrapped, inputs, labels)."""
    model, x, y = case(**(model or {}))
    rows, columns = grid(*shape)
    parallel(model, how, columns)
    if change is not None:
        change(model)
    if order == "before":
        shard(model, rows, **(sharding or {}))
    module = wrapped(model, **options)
    if order != "before":
        shard(model, rows, module if order == "around" else None, **(sharding or {}))
    return model, module, x, y


def gradients(model):
    return {name.replace("_checkpoint_wrapped_module.", ""): whole(p.grad) for name, p in model.named_parameters()}


def sums(how="features", steps=1, zero=True, passes=1, per_layer=False, split="equal", **options):
    """({name: p.grad of all parts}, norms, clip factors, collectives of the last step)."""
    clipper = dpfast.ConstantPerLayerClipper(C) if per_layer else None
    model, module, x, y = built(how, passes=passes, norm_clipper=clipper, **options)
    for _ in range(steps):
        if zero:
            module.zero_grad(set_to_none=zero is True)
        fsdp_worker.COUNT.clear()
        own = part(x, split)
        if len(own):
            backward(module, own, part(y, split), passes)
        else:
            with module.valid(torch.zeros(1, dtype=torch.bool)):
                backward(module, x[:1], y[:1], passes)
    collectives = dict(fsdp_worker.COUNT)
    return gradients(model), module.get_norm_sample(), module._clip_factors, collectives


UNITS = torch.tensor([0, 2, 0, 2, -1, 2])
"""Whose each of six samples is, on its own ranks; unit 1 has none."""


def of_units(how):
    """As ``sums``, without collectives."""
    model, module, x, y = built(how)
    with module.units(part(UNITS), 3):
        losses(module, part(x), part(y)).sum().backward()
    return gradients(model), module.get_norm_sample(), module._clip_factors


def freezes_later(one):
    """The error of the second step, before which the last rank, or its row of the grid, has frozen norms; and whether
    no parameter has a gradient after it."""
    model, module, x, y = built("positions")
    backward(module, part(x), part(y))
    module.zero_grad(set_to_none=True)
    for block in model.blocks:
        block.n1.weight.requires_grad_(dist.get_rank() < (3 if one else 2))
    return attempt(backward, module, part(x), part(y)), all(p.grad is None for p in model.parameters())


def checkpointed(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def frozen(model):
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in FROZEN))


def some_frozen():
    model, module, x, y = built("positions", change=frozen)
    backward(module, part(x), part(y))
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def plain(how):
    model, x, y = case()
    rows, columns = grid()
    shard(parallel(model, how, columns), rows)
    for _ in range(2):
        fsdp_worker.COUNT.clear()
        losses(model, part(x), part(y)).sum().backward()
    return dict(fsdp_worker.COUNT)


def accumulated():
    """Gradients of two passes, of which the first is not reduced; collectives of that one."""
    model, module, x, y = built("positions")
    x, y = part(x), part(y)
    model.set_requires_gradient_sync(False)
    fsdp_worker.COUNT.clear()
    backward(module, x[:1], y[:1])
    collectives = dict(fsdp_worker.COUNT)
    model.set_requires_gradient_sync(True)
    backward(module, x[1:], y[1:])
    return gradients(model), collectives


def refused(how="features", before=lambda: None, threshold=C, inputs=None, **options):
    """The error of a step, and whether no parameter has a gradient after it."""
    model, module, x, y = built(how, max_grad_norm=threshold, **options)
    before()
    x, y = part(x), part(y)
    error = attempt(backward, module, x if inputs is None else inputs(x), y)
    return error, all(p.grad is None for p in model.parameters())


def optimizer_of(model, secret, batches=None, noise=1e4, lr=1e-6):
    return dpfast.opacus.DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=lr),
        noise_multiplier=noise,
        max_grad_norm=C,
        expected_batch_size=6,
        secret=secret,
        batches=batches,
    )


def noise(steps=30):
    """This rank's own noise of each step, and the whole one's."""
    model, module, x, y = built("positions")
    optimizer = optimizer_of(model, SharedSecret.agreed())
    found, own = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        backward(module, part(x), part(y))
        optimizer.step()
        found.append(gradients(model))
        own.append({name: p.grad.to_local().clone() for name, p in model.named_parameters()})
    return found, own


def trained(shape, steps, state=None):
    """(weights after, the state to go on from): Poisson batches of 12 samples and noise, on any grid."""
    secret = SharedSecret(bytes(range(32)))
    model, module, _, _ = built("positions", shape=shape)
    torch.manual_seed(1)
    x, y = torch.randint(13, (12, 8)), torch.randint(13, (12, 8))
    batches = PoissonBatches(12, 0.9, secret, steps=steps, rank=dist.get_rank() // shape[1], ranks=shape[0])
    optimizer = optimizer_of(model, secret, batches, noise=1.0, lr=0.1)
    private = dpfast.opacus.PrivateState(optimizer, dpfast.opacus.PrivacyEngine().accountant, batches)
    if state is not None:
        weights, of_run = state
        with torch.no_grad():
            for name, p in model.named_parameters():
                everywhere = distribute_tensor(weights[name], p.device_mesh, [Replicate()] * p.device_mesh.ndim)
                p.copy_(everywhere.redistribute(placements=p.placements))
        private.load_state_dict(of_run)
    taken = []
    for batch in batches:
        taken.append(batch)
        optimizer.zero_grad()
        backward(module, x[batch], y[batch])
        optimizer.step()
    return taken, {name: whole(p) for name, p in model.named_parameters()}, private.state_dict()


def without_a_secret():
    """One part of the samples, and four of each parameter."""
    model, module, x, y = built(shape=(1, 4))
    backward(module, x, y)
    optimizer_of(model, None).step()


def engine():
    model, x, y = case()
    rows, columns = grid()
    shard(parallel(model, on=columns), rows)
    dpfast.opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=C,
        grad_sample_mode="dpfast",
    )


def resharded_to_a_few():
    """FSDP2 alone, over all four."""
    model, x, y = case()
    shard(model, None, reshard_after_forward=2)
    backward(wrapped(model), x, y)


def main():
    rank = dist.get_rank()
    found = {}
    for how in HOW:
        found[how] = attempt(sums, how, steps=2)
        found[how, "two passes"] = attempt(sums, how, passes=2)
        found[how, "per layer"] = attempt(sums, how, per_layer=True)
        found[how, "plain"] = plain(how)
        found[how, "units"] = attempt(of_units, how)
    for order in ("after", "around"):
        found[order] = attempt(sums, "positions", order=order, steps=2)
    for split in SPLITS:
        found[split] = attempt(sums, "vocabulary", split=split)
    found["tied"] = attempt(sums, "positions", model={"tied": True})
    found["few words"] = attempt(sums, "vocabulary", model={"vocabulary": 3})
    found["checkpointed"] = attempt(sums, "positions", change=checkpointed)
    found["frozen"] = attempt(some_frozen)
    found["copies"] = attempt(sums, "positions", shape=(2, 1, 2))
    found["layer by layer"] = attempt(sums, steps=2, sharding={"layers": True})
    found["kept whole"] = attempt(sums, "positions", steps=2, sharding={"reshard_after_forward": False})
    found["offloaded"] = attempt(sums, sharding={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    found["bf16"] = attempt(sums, sharding={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})
    found["added up"] = attempt(sums, "positions", steps=3, zero=False)
    found["accumulated"] = attempt(accumulated)
    found["noise"] = attempt(noise)
    found["trained"] = attempt(trained, (2, 2), 3)
    _, weights, state = attempt(trained, (2, 2), 1)
    found["resumed"] = attempt(trained, (4, 1), 2, (weights, state))
    found["threshold of parts"] = refused(threshold=C * (1 + rank % 2))
    found["threshold of shards"] = refused(threshold=C * (1 + rank // 2))
    found["threshold of one"] = refused(threshold=C * (1 + (rank == 3)))
    found["inputs"] = refused(inputs=lambda x: x.roll(rank % 2, 0))
    found["random"] = refused("vocabulary", lambda: torch.manual_seed(rank), model={"dropout": 0.5})
    found["one freezes"], found["a row freezes"] = freezes_later(True), freezes_later(False)
    found["GradSampleModule"] = attempt(backward, built(cls=dpfast.GradSampleModule)[1], *case()[1:])
    found["without a secret"], found["engine"] = attempt(without_a_secret), attempt(engine)
    found["resharded to a few"] = attempt(resharded_to_a_few)
    return found


if __name__ == "__main__":
    rank_main(main)
