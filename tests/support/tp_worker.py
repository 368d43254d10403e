"""One rank of tests/distributed/test_tensor_parallel.py: the ways of tensor parallel that work, and those refused."""

from collections import Counter

import torch
import torch.distributed as dist
from processes import attempt, rank_main
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import dpfast
import dpfast.opacus
from dpfast.distributed import SharedSecret
from dpfast.testing import loop_over_samples

C, D, HEADS, HIDDEN = 0.5, 8, 4, 12
SENT = Counter()


def count(name):
    function = getattr(dist, name)

    def counted(*args, **options):
        output, *rest = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        SENT[name] += (rest[0] if rest else output).nbytes
        return function(*args, **options)

    setattr(dist, name, counted)


for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
    count(name)


class Block(nn.Module):
    """Nearly every linear layer has a bias."""

    def __init__(self, norm):
        super().__init__()
        self.n1, self.n2 = norm(D), norm(D)
        self.q, self.v, self.o = (nn.Linear(D, D) for _ in range(3))
        self.k = nn.Linear(D, D, bias=False)  # the gradient of its bias is 0
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x):
        y = self.n1(x)
        q, k, v = (f(y).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=13, tied=False, norm=nn.LayerNorm, padding=None, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, D, padding_idx=padding)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.norm, self.dropout = norm(D), nn.Dropout(dropout)
        self.head = nn.Linear(D, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.norm(x)))


def case(n=6, t=8, vocabulary=13, **options):
    torch.manual_seed(0)
    model = Model(vocabulary, **options)
    return model, torch.randint(vocabulary, (n, t)), torch.randint(vocabulary, (n, t))


def losses(model, x, y):
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def exact(frozen=(), **options):
    """Gradients of each sample, one by one and in fp64, of one process that has the whole model."""
    model, x, y = case(**options)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    return loop_over_samples(model, lambda m, a, b: losses(m, a, b).sum(), x, y)


def mesh(*shape):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=("a", "b")[: len(shape) or 1])


def parallel(model, how="features", on=None):
    """Features: attention and feed-forward layers alone. Vocabulary: table and head too. Columns: the table by columns.
    Positions: norms on parts of the positions, besides (SequenceParallel)."""
    on = mesh() if on is None else on
    sequence = how == "positions"
    row = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    col = {"input_layouts": Shard(1)} if sequence else {}
    for block in model.blocks:
        plan = {name: ColwiseParallel(**col) for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel(**row) for name in ("o", "down")}
        if sequence:
            plan |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
        parallelize_module(block, on, plan)
    tied = model.head.weight is model.tokens.weight
    plan = {}
    if how in ("vocabulary", "positions"):
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), **row)
        plan["head"] = ColwiseParallel(output_layouts=Replicate(), **col)
    if how == "columns":
        plan["tokens"] = ColwiseParallel(output_layouts=Replicate())
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, on, plan)
    if tied:
        model.head.weight = model.tokens.weight
    return model


def whole(x):
    return x.full_tensor().detach().clone() if isinstance(x, DTensor) else x.detach().clone()


def backward(module, x, y, passes=1):
    own = losses(module, x, y)
    if passes == 1:
        own.sum().backward()
        return
    own.sum().backward(retain_graph=True)
    factors = module.get_clipping_coef()
    module.disable_hooks()
    (factors * own).sum().backward()
    module.enable_hooks()


def wrapped(model, cls=dpfast.GradSampleModuleFastGradientClipping, **options):
    given = {} if cls is dpfast.GradSampleModule else {"max_grad_norm": C}
    return cls(model, loss_reduction="sum", **{**given, **options})


def sums(
    how="features", steps=2, zero=True, passes=1, per_layer=False, frozen=(), checkpointed=False, model=None, **options
):
    """({name: p.grad of all parts}, norms, clip factors, placements, bytes that dpfast has sent in the last step)."""
    model, x, y = case(**(model or {}))
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    parallel(model, how)
    for name, p in model.named_parameters():  # SequenceParallel makes new parameters
        p.requires_grad_(not any(part in name for part in frozen))
    if checkpointed:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    clipper = dpfast.ConstantPerLayerClipper(C) if per_layer else None
    module = wrapped(model, passes=passes, norm_clipper=clipper, **options)
    for _ in range(steps):
        if zero:
            module.zero_grad(set_to_none=zero is True)
        SENT.clear()
        backward(module, x, y, passes)
    sent = dict(SENT)
    clean = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters() if p.requires_grad}
    placements = {name: getattr(p.grad, "placements", None) for name, p in clean.items()}
    return (
        {name: whole(p.grad) for name, p in clean.items()},
        module.get_norm_sample(),
        module._clip_factors,
        placements,
        sent,
    )


def padded():
    """The gradients of a batch of which two samples are padding."""
    model, x, y = case()
    module = wrapped(parallel(model, "positions"))
    with module.valid(torch.arange(6) < 4):
        backward(module, x, y)
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def refused(change, how="features", around=None, **options):
    """The error of a step, after which no parameter has a gradient."""
    model, x, y = case(**options.pop("model", {}))
    parallel(model, how)
    change(model)
    module = wrapped(model, **options)
    module = module if around is None else around(module)
    error = attempt(backward, module, x, y)
    return error, all(p.grad is None for p in model.parameters())


def other_inputs():
    model, x, y = case()
    module = wrapped(parallel(model))
    error = attempt(backward, module, x.roll(dist.get_rank(), 0), y)
    return error, all(p.grad is None for p in model.parameters())


def other_random_numbers():
    model, x, y = case(dropout=0.5)
    module = wrapped(parallel(model, "vocabulary"))
    torch.manual_seed(dist.get_rank())
    error = attempt(backward, module, x, y)
    return error, all(p.grad is None for p in model.parameters())


def other_threshold():
    model, x, y = case()
    module = wrapped(parallel(model), max_grad_norm=C * (1 + dist.get_rank()))
    error = attempt(backward, module, x, y)
    return error, all(p.grad is None for p in model.parameters())


def placed(module, name, place, on=None):
    setattr(
        module,
        name,
        nn.Parameter(distribute_tensor(whole(getattr(module, name)), mesh() if on is None else on, [place])),
    )


def hooks_off():
    model, x, y = case()
    module = wrapped(parallel(model))
    own = losses(module, x, y).sum()
    module.disable_hooks()
    own.backward()


def with_ddp():
    model, x, y = case()
    backward(DistributedDataParallel(wrapped(parallel(model, on=mesh(1, 2)["b"]))), x, y)


def noise(steps=30):
    """The noise of each step, and whether replicas have gone on being the same."""
    model, x, y = case()
    module = wrapped(parallel(model, "positions"))
    secret = SharedSecret.agreed()
    optimizer = dpfast.opacus.DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=1e-6),
        noise_multiplier=1e4,
        max_grad_norm=C,
        expected_batch_size=6,
        secret=secret,
    )
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        backward(module, x, y)
        optimizer.step()
        found.append({name: whole(p.grad) for name, p in model.named_parameters()})
    replicas = {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) or p.placements == (Replicate(),)
    }
    return found, replicas


def without_a_secret():
    model, x, y = case()
    module = wrapped(parallel(model))
    optimizer = dpfast.opacus.DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=6
    )
    backward(module, x, y)
    optimizer.step()


def failing():
    """Every rank fails in the middle of its backward pass; the next step is right."""
    model, x, y = case()
    module = wrapped(parallel(model, "positions"))

    def fail(grad):
        raise ValueError("in the middle")

    handle = model.blocks[0].down.register_forward_hook(lambda *a: a[-1].register_hook(fail) and None)
    error = attempt(backward, module, x, y)
    handle.remove()
    untouched = all(p.grad is None for p in model.parameters())
    backward(module, x, y)
    return error, untouched, {name: whole(p.grad) for name, p in model.named_parameters()}


HOW = ("features", "vocabulary", "columns", "positions")


def on_four():
    """What more ranks may change: parts of 13 rows, a rank without any row, as many samples as ranks, order of sums."""
    found = {how: attempt(sums, how) for how in HOW}
    found["positions", "N = ranks"] = attempt(sums, "positions", model={"n": 4})
    found["positions", "per layer"] = attempt(sums, "positions", per_layer=True)
    found["few words"] = attempt(sums, "vocabulary", model={"vocabulary": 3})
    found["tied, positions"] = attempt(sums, "positions", model={"tied": True})
    found["noise"], found["inputs"] = attempt(noise), other_inputs()
    return found


def main():
    if dist.get_world_size() == 4:
        return on_four()
    found = {}
    for how in HOW:
        found[how] = attempt(sums, how)
        found[how, "N = T"] = attempt(sums, how, model={"n": 8})
        found[how, "N = ranks"] = attempt(sums, how, model={"n": 2})
        found[how, "per layer"] = attempt(sums, how, per_layer=True)
        found[how, "two passes"] = attempt(sums, how, passes=2)
        found[how, "frozen"] = attempt(sums, how, frozen=("norm", "q.weight", "o.bias", "n2"))
    for name, options in {"empty": {"n": 0}, "one": {"n": 1}, "one word": {"vocabulary": 1}}.items():
        found[name] = attempt(sums, "vocabulary", model=options)
    found["tied"] = attempt(sums, "vocabulary", model={"tied": True})
    found["tied, positions"] = attempt(sums, "positions", model={"tied": True})
    found["padding"] = attempt(sums, "vocabulary", model={"padding": 7})
    found["rms"] = attempt(sums, "positions", model={"norm": nn.RMSNorm})
    found["materialized"] = attempt(sums, "positions", use_ghost_clipping=False)
    found["functorch"] = attempt(sums, "positions", force_functorch=True)
    found["added up"] = attempt(sums, "positions", steps=3, zero=False)
    found["zeroed"] = attempt(sums, "positions", steps=3, zero="in place")
    found["padded"] = attempt(padded)
    found["checkpointed"] = attempt(sums, "positions", checkpointed=True)
    found["noise"] = attempt(noise)
    found["without a secret"] = attempt(without_a_secret)
    found["failing"] = attempt(failing)
    found["inputs"], found["random"], found["threshold"] = other_inputs(), other_random_numbers(), other_threshold()
    found["hooks off"] = attempt(hooks_off)
    found["GradSampleModule"] = refused(lambda model: None, cls=dpfast.GradSampleModule)
    found["placement"] = refused(lambda model: placed(model.blocks[0].up, "bias", Replicate()))
    found["DDP"] = attempt(with_ddp)
    return found


if __name__ == "__main__":
    rank_main(main)
