"""One rank of tests/distributed/test_fsdp.py: FSDP2 (``fully_shard``), in the ways that work and those refused."""

from collections import Counter

import torch
import torch.distributed as dist
from opacus_cases import opacus_example
from processes import attempt, rank_main
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset

import dpfast
import dpfast.opacus
from dpfast.distributed import SharedSecret

N, T, D, VOCABULARY, C = 8, 5, 6, 13, 0.5
SPLITS = {"equal": 4, "unequal": 5, "empty": 8}
COUNT = Counter()


def count(name):
    function = getattr(dist, name, None)

    def counted(*args, **options):
        COUNT["reduce_scatter" if "reduce_scatter" in name else name] += 1
        return function(*args, **options)

    if function is not None:
        setattr(dist, name, counted)


for name in (
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_reduce",
):
    count(name)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(torch.tanh(self.up(x)))


class Functional(Block):
    """Uses a weight past its own module, in a way that has a rule."""

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.out.weight)


class Escaping(Block):
    """In a way that has none."""

    def forward(self, x):
        return super().forward(x) + torch.cdist(x, self.out.weight)


class Model(nn.Module):
    """``odd`` sizes: 13 rows over two ranks, and a parameter of one entry."""

    def __init__(self, tied=True, block=Block):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.activation = nn.LayerNorm(D), nn.PReLU()
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.activation(self.norm(x)))


def case(tied=True, block=Block):
    torch.manual_seed(0)
    return Model(tied, block), torch.randint(VOCABULARY, (N, T)), torch.randint(VOCABULARY, (N, T))


def losses(model, x, y):
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def part(x, split="equal"):
    cut = SPLITS[split]
    return x[:cut] if dist.get_rank() == 0 else x[cut:]


def whole(p):
    return p.full_tensor().detach().clone()


def step(module, x, y, passes=1):
    own = losses(module, x, y)
    if passes == 1:
        own.sum().backward()
    else:
        own.sum().backward(retain_graph=True)
        factors = module.get_clipping_coef()
        module.disable_hooks()
        (factors * own).sum().backward()
        module.enable_hooks()


def sums(
    split="equal",
    tied=True,
    order="before",
    steps=1,
    passes=1,
    zero=True,
    checkpointed=False,
    clipper=None,
    block=Block,
    **options,
):
    """({name: p.grad of all shards}, norms, collectives of the last step)."""
    model, x, y = case(tied, block)
    if checkpointed:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    how = {"loss_reduction": "sum", "max_grad_norm": C, "passes": passes, "norm_clipper": clipper}
    if order == "before":
        shard(model, **options)
    module = dpfast.GradSampleModuleFastGradientClipping(model, **how)
    if order == "after":
        shard(model, **options)
    if order == "around":
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(module, **options)
    x, y = part(x, split), part(y, split)
    for _ in range(steps):
        if zero:
            module.zero_grad(set_to_none=zero is True)
        COUNT.clear()
        step(module, x, y, passes)
    collectives = dict(COUNT)
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): whole(p.grad) for name, p in model.named_parameters()}
    return gradients, module.get_norm_sample(), collectives


def plain(**options):
    model, x, y = case()
    shard(model, **options)
    for _ in range(2):
        COUNT.clear()
        losses(model, part(x), part(y)).sum().backward()
    return dict(COUNT)


def backward(model, cls=dpfast.GradSampleModuleFastGradientClipping, threshold=C):
    _, x, y = case()
    options = {} if cls is dpfast.GradSampleModule else {"max_grad_norm": threshold}
    losses(cls(model, loss_reduction="sum", **options), part(x), part(y)).sum().backward()


def disagreement():
    model = shard(case()[0])
    error = attempt(backward, model, threshold=C * (1 + dist.get_rank()))
    return error, all(p.grad is None for p in model.parameters())


def blocks_alone():
    model = case()[0]
    for block in model.blocks:
        fully_shard(block)
    backward(model)


def accumulated(given_up=False, passes=1):
    """As ``sums``, of parts of the batch of which the last alone is reduced; ``given_up``: others came before, and the
    gradients were set to zero. Collectives are those of the passes that reduce nothing."""
    model, x, y = case()
    shard(model)
    module = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C, passes=passes)
    x, y = part(x), part(y)
    model.set_requires_gradient_sync(False)
    if given_up:
        step(module, x, y, passes)
        for p in model.parameters():
            p.grad = None if given_up == "to none" else p.grad.zero_()
    COUNT.clear()
    for i in (0, 1):
        step(module, x[i : i + 1], y[i : i + 1], passes)
    collectives = dict(COUNT)
    model.set_requires_gradient_sync(True)
    step(module, x[2:], y[2:], passes)
    return {name: whole(p.grad) for name, p in model.named_parameters()}, collectives


def step_without_sync():
    model, x, y = case()
    module = dpfast.GradSampleModuleFastGradientClipping(shard(model), loss_reduction="sum", max_grad_norm=C)
    optimizer = dpfast.opacus.DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=C,
        expected_batch_size=N,
        secret=SharedSecret.agreed(),
    )
    model.set_requires_gradient_sync(False)
    step(module, part(x), part(y))
    optimizer.step()


def sync_of_a_part():
    model = shard(case()[0])
    model.blocks[0].set_requires_gradient_sync(False)
    backward(model)


def after_a_failure():
    """Errors of a backward pass that fails in the middle, and of the next."""
    model = shard(case()[0])

    def fail(grad):
        raise ValueError("in the middle")

    handle = model.blocks[0].down.register_forward_hook(lambda *a: a[-1].register_hook(fail) and None)
    module = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C)
    _, x, y = case()
    first = attempt(step, module, part(x), part(y))
    handle.remove()
    return first, attempt(step, module, part(x), part(y)), all(p.grad is None for p in model.parameters())


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def one_module_further_out():
    model, x, y = case()
    around = fully_shard(Around(dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)))
    losses(around, part(x), part(y)).sum().backward()


def unfrozen_later():
    """The gradients, after a step in which a layer was frozen."""
    model, x, y = case()
    model.blocks[0].up.requires_grad_(False)
    module = dpfast.GradSampleModuleFastGradientClipping(shard(model), max_grad_norm=C, loss_reduction="sum")
    for _ in range(2):
        module.zero_grad()
        losses(module, part(x), part(y)).sum().backward()
        model.blocks[0].up.requires_grad_(True)
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def train(sigma=0.0, shape=None, mode="dpfast", seed=None, steps=8):
    """PrivacyEngine: (weights, the samples of each step, the gradient of each step)."""
    model, x, y = opacus_example("mlp", 24)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])) if shape else (
        fully_shard(model)
    )
    generator = None if seed is None else torch.Generator().manual_seed(seed + dist.get_rank())
    module, optimizer, *criterion, loader = dpfast.opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.0 if sigma == 0.0 else 0.01),
        data_loader=DataLoader(TensorDataset(x, y, torch.arange(24)), batch_size=6, generator=generator),
        noise_multiplier=sigma,
        max_grad_norm=C,
        noise_generator=generator,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode=mode,
    )
    loss = criterion[0] if criterion else nn.CrossEntropyLoss()
    taken, gradients = [], []
    while len(taken) < steps:
        for x, y, index in loader:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
            taken.append(index.tolist())
            gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
    return {name: whole(p) for name, p in model.named_parameters()}, taken, gradients


def main():
    found = {}
    for order in ("before", "after", "around"):
        found[order] = attempt(sums, order=order, steps=2)
        found[order, "untied"] = attempt(sums, order=order, tied=False)
        found[order, "two passes"] = attempt(sums, order=order, steps=2, passes=2)
        found[order, "added up"] = attempt(sums, order=order, steps=3, zero=False)
    for split in SPLITS:
        found[split] = attempt(sums, split, steps=2)
    found["zeroed"] = attempt(sums, steps=2, zero="in place")
    found["checkpointed"] = attempt(sums, steps=2, checkpointed=True)
    found["functional"] = attempt(sums, steps=2, block=Functional)
    found["kept whole"] = attempt(sums, steps=2, reshard_after_forward=False)
    found["offloaded"] = attempt(sums, steps=2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    found["per layer"] = attempt(sums, steps=2, clipper=dpfast.ConstantPerLayerClipper(C))
    found["bf16"] = attempt(sums, steps=2, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for name, shape in {"one replica": (1, 2), "two replicas": (2, 1)}.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        found[name] = attempt(sums, steps=2, mesh=mesh)
    found["plain"], found["plain, kept whole"] = plain(), plain(reshard_after_forward=False)
    found["disagreement"] = disagreement()
    found["unfrozen later"] = attempt(unfrozen_later)
    found["escaping"] = attempt(backward, shard(case(block=Escaping)[0]))
    found["blocks alone"] = attempt(blocks_alone)
    found["without sync"] = attempt(step_without_sync)
    found["sync of a part"] = attempt(sync_of_a_part)
    found["failed"] = after_a_failure()
    found["accumulated"] = attempt(accumulated)
    found["accumulated", "two passes"] = attempt(accumulated, passes=2)
    for how in ("to none", "in place"):
        found["accumulated", how] = attempt(accumulated, how)
    found["further out"] = attempt(one_module_further_out)
    found["materialized"] = attempt(backward, shard(case()[0]), dpfast.GradSampleModule)
    found["another dimension"] = attempt(backward, shard(case()[0], shard_placement_fn=lambda p: Shard(p.dim() - 1)))
    for mode in ("dpfast", "dpfast_two_pass"):
        found["engine", mode] = attempt(train, mode=mode, seed=1)
        found["noise", mode] = attempt(train, 1.0, mode=mode)
    found["noise", "replicas"] = attempt(train, 1e4, shape=(2, 1), steps=40)
    found["noise", "shards"] = attempt(train, 1e4, steps=40)
    return found


if __name__ == "__main__":
    rank_main(main)
