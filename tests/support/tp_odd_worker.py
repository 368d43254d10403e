"""One rank of tests/distributed/test_odd_tensor_parallel.py: odd places, adapters, ranks that disagree."""

import peft
import torch
import torch.distributed as dist
import tp_worker
from processes import attempt, rank_main
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from tp_worker import C, mesh, parallel, whole, wrapped

import dpfast


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.dropout(torch.tanh(self.first(x))))))


class Columns(Net):
    """Ends with a layer that may be parted by columns."""

    def forward(self, x):
        return self.up(torch.tanh(self.first(x)))


def case(net=Net, **options):
    """A model and inputs (N, T, D)."""
    torch.manual_seed(0)
    model = net(**options)
    if net is Columns:
        del model.down
    return model, torch.randn(4, 7, 5)


def losses(model, x):
    """A sum over features, of which each rank may have its own."""
    return model(x).square().sum(-1).mean(1)


def with_adapters():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["q", "o", "up", "down"], lora_alpha=5)
    model = peft.get_peft_model(tp_worker.Model(), config)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.3)
    return model, *tp_worker.case()[1:]


def parted(model, **styles):
    return parted_as(model, styles or {"up": ColwiseParallel(), "down": RowwiseParallel()})


def parted_as(model, plan):
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    parallelize_module(model, mesh(), plan)
    for name, p in model.named_parameters():  # torch 2.8's are new ones that are trained
        p.requires_grad_(trained[name])
    return model


def gradients(model):
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def step(model, x, *labels, of=losses, later=False, **options):
    """({name: p.grad of all parts}, norms); ``later``: parted after it is wrapped."""
    module = wrapped(model, **options)
    if later:
        parted(model)
    of(module, x, *labels).sum().backward()
    return gradients(model), module.get_norm_sample()


def adapters():
    model, x, y = with_adapters()
    column, row = ColwiseParallel, RowwiseParallel
    for block in model.base_model.model.blocks:
        plan = {"k": column(), "v": column()}
        plan |= {f"{name}.{part}": column() for name in ("q", "up") for part in ("base_layer", "lora_B.default")}
        plan |= {f"{name}.{part}": row() for name in ("o", "down") for part in ("base_layer", "lora_A.default")}
        parted_as(block, plan)
    return step(model, x, y, of=tp_worker.losses)


def loss_of_parts():
    model, x, y = tp_worker.case()
    parallel(model)
    parallelize_module(model, mesh(), {"head": ColwiseParallel(use_local_output=False)})

    def of(module, x, y):
        own = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten(), reduction="none")
        return (own.to_local() if isinstance(own, DTensor) else own).view(y.shape).mean(1)

    with loss_parallel():
        return step(model, x, y, of=of)


def output_of_parts():
    """Two passes of a model whose output is a DTensor, of which each rank has a part of the positions."""
    model, x = case()
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    module = wrapped(parted(model, up=ColwiseParallel(), down=row), passes=2)
    of_samples = module(x).full_tensor().square().sum(-1).mean(1)
    of_samples.sum().backward(retain_graph=True)
    factors = module.get_clipping_coef()
    module.disable_hooks()
    module.zero_grad()
    (factors * of_samples).sum().backward()
    return gradients(model), module.get_norm_sample()


def half(autocast):
    model, x = case()
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    module = wrapped(parted(model))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own = losses(module, x)
    own.sum().backward()
    return gradients(model), module.get_norm_sample()


def own_random_numbers():
    """The norm of one sample's clipped gradient, of parted weights alone, and what was measured of it."""
    model, x = case(dropout=0.5)
    for p in (model.first.weight, model.first.bias, model.down.bias):
        p.requires_grad_(False)
    module = wrapped(parted(model))
    torch.manual_seed(dist.get_rank())
    losses(module, x[:1]).sum().backward()
    total = torch.stack([g.norm() for g in gradients(model).values()]).norm()
    return float(total), float(module.get_norm_sample())


def disagreeing(what):
    """The error, and whether no parameter has a gradient."""
    model, x = case()
    other, per_layer = dist.get_rank() == 1, dpfast.ConstantPerLayerClipper(C)
    if what.startswith("trainable"):
        model.down.bias.requires_grad_(not other)
    clipper = per_layer if what == "trainable, per layer" or (what == "clipper" and other) else None
    module = wrapped(parted(model), norm_clipper=clipper, passes=2 if what == "passes" and other else 1)
    error = attempt(lambda: losses(module, x).sum().backward())
    return error, all(p.grad is None for p in model.parameters())


def changing_later(what):
    """Two steps, between which ranks, or the last one alone, freeze or unfreeze norms that each sees a part of the
    positions of: ({name: p.grad}, norms) of the second, or (its error, whether no parameter has a gradient)."""
    model, x, y = tp_worker.case()
    module = wrapped(parallel(model, "positions"))
    norms = [block.n1.weight for block in model.blocks]
    for p in norms:
        p.requires_grad_(what not in ("one unfreezes", "all unfreeze"))
    tp_worker.losses(module, x, y).sum().backward()
    module.zero_grad(set_to_none=True)
    if what.startswith("all") or dist.get_rank() == dist.get_world_size() - 1:
        for p in norms:
            p.requires_grad_(what in ("one unfreezes", "all unfreeze"))
    found = attempt(lambda: tp_worker.losses(module, x, y).sum().backward())
    if found is None:
        return gradients(model), module.get_norm_sample()
    return found, all(p.grad is None for p in model.parameters())


def changing_between(one):
    """As :func:`changing_later`, of norms that are frozen between two passes; by the last rank alone, or by all."""
    model, x, y = tp_worker.case()
    module = wrapped(parallel(model, "positions"), passes=2)
    of_samples = tp_worker.losses(module, x, y)
    of_samples.sum().backward(retain_graph=True)
    factors = module.get_clipping_coef()
    module.disable_hooks()
    if not one or dist.get_rank() == dist.get_world_size() - 1:
        for block in model.blocks:
            block.n1.weight.requires_grad_(False)
    found = attempt(lambda: (factors * of_samples).sum().backward())
    if found is None:
        return gradients(model), module.get_norm_sample()
    return found, all(p.grad is None for p in model.parameters())


IDS = torch.tensor([0, 2, 1, -1, 0, 2])
"""Whose each of six samples is; unit 3 has none."""


def of_units(how, per_unit="sum", per_layer=False):
    """({name: p.grad}, norms of units, clip factors); some layers' gradients are sums over ranks."""
    model, x, y = tp_worker.case()
    module = wrapped(parallel(model, how), norm_clipper=dpfast.ConstantPerLayerClipper(C) if per_layer else None)
    with module.units(IDS, 4, per_unit=per_unit):
        tp_worker.losses(module, x, y).sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}, module.get_norm_sample(), module._clip_factors


def units_differ():
    model, x, y = tp_worker.case()
    module = wrapped(parallel(model))
    with module.units(IDS.roll(dist.get_rank()), 4):
        tp_worker.losses(module, x, y).sum().backward()


def of_tokens():
    model, x = case()
    module = wrapped(parted(model))
    with module.units(torch.tensor([0, 1, 1, -1]).unsqueeze(1).expand(4, 7).contiguous(), 2) as units:
        units.sums(module(x).square().sum(-1)).sum().backward()


LATER = ("one freezes", "one unfreezes", "all freeze", "all unfreeze")
DISAGREEMENTS = ("trainable", "trainable, per layer", "clipper", "passes")


def main():
    columns = case(Columns)
    found = {
        "columns and rows": attempt(lambda: step(parted(case()[0]), case()[1])),
        "one position": attempt(lambda: step(parted(case()[0]), case()[1][:, 0], of=lambda m, x: m(x).square().sum(1))),
        "columns": attempt(step, parted(columns[0], up=ColwiseParallel()), columns[1]),
        "wrapped first": attempt(step, *case(), later=True),
    }
    if dist.get_world_size() == 3:
        return found
    gathered, rows = case(Columns), case()
    found["columns, gathered"] = attempt(
        step, parted(gathered[0], up=ColwiseParallel(output_layouts=Replicate())), gathered[1]
    )
    found["rows"] = attempt(step, parted(rows[0], down=RowwiseParallel(input_layouts=Replicate())), rows[1])
    found["adapters"], found["loss of parts"] = attempt(adapters), attempt(loss_of_parts)
    found["output of parts"] = attempt(output_of_parts)
    found["autocast"], found["bf16"] = attempt(half, True), attempt(half, False)
    found["own random numbers"] = attempt(own_random_numbers)
    for how in tp_worker.HOW:
        found["units", how] = attempt(of_units, how)
    found["units", "mean"] = attempt(of_units, "positions", "mean")
    found["units", "per layer"] = attempt(of_units, "positions", per_layer=True)
    found["units differ"], found["tokens"] = attempt(units_differ), attempt(of_tokens)
    for what in LATER:
        found[what] = changing_later(what)
    found["one freezes between"], found["all freeze between"] = changing_between(True), changing_between(False)
    for what in DISAGREEMENTS:
        found[what] = disagreeing(what)
    return found


if __name__ == "__main__":
    rank_main(main)
