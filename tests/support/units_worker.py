"""One rank of tests/distributed/test_units.py: units of samples and of packed tokens under DDP and FSDP2."""

import torch
import torch.distributed as dist
from cases import Mlp
from opacus_cases import opacus_example
from packed_cases import Packed, losses_of, packed
from processes import attempt, rank_main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dpfast
import dpfast.opacus

C = 0.5
USERS = torch.tensor([0, 2, 0, -1, 2, 0, 1, 3, 1, -1])
"""Of ten samples; unit 4 has none."""
SPLITS = {
    "unequal": ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9]),
    "no samples": (list(range(10)), []),
    "nobody's": ([0, 1, 2, 4, 5, 6, 7, 8], [3, 9]),
}
"""The samples of each rank; units lie whole on one."""
ROWS = {"unequal": ([0], [1]), "no rows": ([0, 1], []), "nobody's": ([0, 1], [1])}
"""The packed rows of each rank; the last one's second row is nobody's there."""
WRAPPERS = ("DDP", "DDP inside", "FSDP2", "FSDP2 around")


def samples():
    torch.manual_seed(0)
    return Mlp(), torch.randn(10, 12), torch.randint(0, 5, (10,))


def wrapped(model, wrapper, **options):
    """(what to call, the dpfast module)."""
    cls = dpfast.GradSampleModuleFastGradientClipping
    options = {"max_grad_norm": C, **options}
    if wrapper == "DDP":
        module = cls(model, **options)
        return DDP(module), module
    if wrapper == "DDP inside":
        module = cls(DDP(model), **options)
        return module, module
    for child in model.children():
        if any(True for _ in child.parameters()) and not isinstance(model, Packed):  # whose table is tied
            fully_shard(child)
    module = cls(model if wrapper == "FSDP2 around" else fully_shard(model), **options)
    if wrapper == "FSDP2 around":
        fully_shard(module)
    return module, module


def found(model, module):
    grads = {n: p.grad.full_tensor() if wrapper_of(p) else p.grad.clone() for n, p in model.named_parameters()}
    return grads, module.get_norm_sample()


def wrapper_of(p):
    return hasattr(p, "device_mesh")


def of_samples(wrapper, split="unequal", per_unit="sum", reduction="sum", local=False):
    """``local``: ids count this rank's units alone."""
    model, x, y = samples()
    call, module = wrapped(model, wrapper, loss_reduction=reduction)
    mine = SPLITS[split][dist.get_rank()]
    ids, number = USERS[mine], 5
    if local:
        numbers = ids[ids >= 0].unique()
        ids, number = torch.where(ids >= 0, torch.searchsorted(numbers, ids), -1), len(numbers)
    for _ in range(2):
        call.zero_grad()
        with module.units(ids, number, per_unit=per_unit):
            nn.functional.cross_entropy(call(x[mine]), y[mine], reduction=reduction).backward()
    return found(model, module)


def of_tokens(wrapper, split="unequal", per_unit="sum", reduction="sum", mixes="nothing"):
    torch.manual_seed(0)
    model, (batch, _) = Packed(mixes=mixes), packed()
    call, module = wrapped(model, wrapper, loss_reduction=reduction)
    tokens, positions, ids, labels = (x[ROWS[split][dist.get_rank()]] for x in batch)
    if split == "nobody's" and dist.get_rank() == 1:
        ids = torch.full_like(ids, -1)
    for _ in range(2):
        call.zero_grad()
        with module.units(ids, 5, per_unit=per_unit) as units:
            of_unit = units.sums(losses_of(call(tokens, positions), labels))
            (of_unit.sum() if reduction == "sum" else of_unit.mean()).backward()
    return found(model, module)


def other_settings():
    """One rank forgets to say whose its samples are."""
    model, x, y = samples()
    call, module = wrapped(model, "DDP", loss_reduction="sum")
    mine = SPLITS["unequal"][dist.get_rank()]
    if dist.get_rank():
        return nn.functional.cross_entropy(call(x[mine]), y[mine], reduction="sum").backward()
    with module.units(USERS[mine], 5):
        nn.functional.cross_entropy(call(x[mine]), y[mine], reduction="sum").backward()


def engine(wrapper):
    """(the samples of each step, its gradient), of an engine that draws units."""
    model, x, y = opacus_example("mlp", 24)
    users = torch.arange(24) % 9
    module, optimizer, loader = dpfast.opacus.PrivacyEngine().make_private(
        module=DDP(model) if wrapper == "DDP" else fully_shard(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y, torch.arange(24)), batch_size=12),
        noise_multiplier=0.0,
        max_grad_norm=C,
        user_of_record=users,
    )
    taken, gradients = [], []
    for x, y, records in loader:
        names, ids = users[records.long()].unique(return_inverse=True)
        optimizer.zero_grad()
        with module.units(ids, len(names)):
            nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        taken.append(records.tolist())
        gradients.append(found(model, module)[0])
    return taken, gradients, optimizer.expected_batch_size


def main():
    results = {}
    for wrapper in WRAPPERS:
        for split in SPLITS:
            results[wrapper, "samples", split] = attempt(of_samples, wrapper, split)
        for split in ROWS:
            results[wrapper, "tokens", split] = attempt(of_tokens, wrapper, split)
        for per_unit in ("sum", "mean"):
            for kind, run in (("samples", of_samples), ("tokens", of_tokens)):
                results[wrapper, kind, per_unit, "mean"] = attempt(run, wrapper, per_unit=per_unit, reduction="mean")
        results[wrapper, "samples", "local"] = attempt(of_samples, wrapper, local=True)
        results[wrapper, "tokens", "meet"] = attempt(of_tokens, wrapper, mixes="attention")
    results["other settings"] = attempt(other_settings)
    for wrapper in ("DDP", "FSDP2"):
        results[wrapper, "engine"] = attempt(engine, wrapper)
    return results


if __name__ == "__main__":
    rank_main(main)
