"""One rank of tests/opacus/test_ddp.py: PrivacyEngine on a model in DistributedDataParallel."""

import os

import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_cases import opacus_example
from processes import attempt, rank_main
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dpfast.opacus
from dpfast.distributed import SharedSecret

N, C, BATCH, STEPS = 24, 0.5, 6, 8


def private(mode="dpfast", sigma=0.0, ddp=True, seed=None, lr=0.1, **options):
    model, x, y = opacus_example("mlp", N)
    with torch.no_grad():  # DDP gives every process the first one's weights
        for p in model.parameters():
            p += dist.get_rank() if ddp else 0
    generator = None if seed is None else torch.Generator().manual_seed(seed + dist.get_rank())
    made = dpfast.opacus.PrivacyEngine().make_private(
        module=DDP(model) if ddp else model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(TensorDataset(x, y, torch.arange(N)), batch_size=BATCH, generator=generator),
        noise_multiplier=sigma,
        max_grad_norm=[C] * 6 if options.get("clipping") == "per_layer" else C,
        grad_sample_mode=mode,
        noise_generator=generator,
        criterion=nn.CrossEntropyLoss(),
        **options,
    )
    return model, made[0], made[1], made[2] if len(made) == 4 else nn.CrossEntropyLoss(), made[-1]


def train(mode="dpfast", epochs=2, **options):
    """(weights, the samples of each step, the gradient that SGD got in each step)."""
    model, module, optimizer, criterion, loader = private(mode, **options)
    taken, gradients = [], []
    for _ in range(epochs):
        for x, y, index in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
            taken.append(index.tolist())
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: p.detach().clone() for name, p in model.named_parameters()}, taken, gradients


def no_secret():
    """A model of one process given to DDP behind the engine's back, as accelerate.prepare does."""
    model, x, y = opacus_example("mlp", N)
    engine = dpfast.opacus.PrivacyEngine()
    module, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=C,
    )
    ddp = DDP(module)
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()


def step_of_no_sync():
    _, module, optimizer, criterion, loader = private()
    x, y, _ = next(iter(loader))
    with module._module.no_sync():
        criterion(module(x), y).backward()
    optimizer.step()


def dealt_out_again():
    from accelerate import Accelerator, DataLoaderConfiguration

    loader = private()[-1]
    world = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29511,
    }
    os.environ.update({name: str(value) for name, value in world.items()})
    for _ in Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)).prepare(loader):
        pass


def standalone(sigma=1.0, secret=None, past=False):
    """DPOptimizerFast without an engine."""
    model, x, y = opacus_example("mlp", N)
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    optimizer = dpfast.opacus.DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=sigma,
        max_grad_norm=C,
        expected_batch_size=N,
        secret=secret or SharedSecret.agreed(),
    )
    own = slice(dist.get_rank(), None, 2)
    ddp = DDP(module)
    ddp = module if past else ddp
    nn.functional.cross_entropy(ddp(x[own]), y[own], reduction="sum").backward()
    optimizer.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def one_secret_for_two():
    secret = SharedSecret.agreed()
    return [standalone(secret=secret) for _ in range(2)]


def differently(change=None, **options):
    """One rank has another length of data, has looked at a batch, or (``change``) a setting of the optimizer's."""
    _, module, optimizer, criterion, loader = private(sigma=1.0, **options)
    if dist.get_rank() == 0:
        optimizer.noise_multiplier *= 2 if change == "noise" else 1
        if change == "look":
            next(iter(loader))
        if change == "rate":
            loader.batch_sampler.sample_rate /= 2
    for x, y, _ in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()


def private_again():
    """A second engine takes what the first has made: (samples of each step, expected batch size)."""
    _, module, optimizer, _, loader = private()
    _, optimizer, loader = dpfast.opacus.PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=C
    )
    return [index.tolist() for _ in range(4) for *_, index in loader], optimizer.expected_batch_size


def group_of_one():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model, x, y = opacus_example("mlp", N)
    dpfast.opacus.PrivacyEngine().make_private(
        module=DDP(model, process_group=groups[dist.get_rank()]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=C,
    )


def memory_manager():
    """One rank takes its part in more pieces than the other."""
    _, module, optimizer, criterion, loader = private(sigma=1.0, seed=3)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=1 + dist.get_rank(), optimizer=optimizer
    ) as batches:
        for x, y, _ in batches:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()


def main():
    return {
        "dpfast": attempt(train, lr=0.0, seed=1),
        "dpfast_two_pass": attempt(train, "dpfast_two_pass", lr=0.0, seed=1),
        "per layer": attempt(train, clipping="per_layer", lr=0.0, seed=1),
        "noise": attempt(train, sigma=1.0),
        "noise, two passes": attempt(train, "dpfast_two_pass", sigma=1.0),
        "seeded": attempt(train, sigma=1.0, seed=5),
        "seeded again": attempt(train, sigma=1.0, seed=5),
        "large noise": attempt(train, sigma=1e4, epochs=12, lr=0.0),
        "materialize": attempt(train, "dpfast_materialize"),
        "no secret": attempt(no_secret),
        "no_sync": attempt(step_of_no_sync),
        "dealt out again": attempt(dealt_out_again),
        "standalone": attempt(standalone),
        "memory manager": attempt(memory_manager),
        "one secret for two": attempt(one_secret_for_two),
        "secrets differ": attempt(standalone, secret=SharedSecret(bytes(31) + bytes([dist.get_rank()]))),
        "past DDP": attempt(standalone, past=True),
        "noise differs": attempt(differently, "noise"),
        "looked at": attempt(differently, "look"),
        "rates differ": attempt(differently, "rate"),
        "private again": attempt(private_again),
        "group of one": attempt(group_of_one),
    }


if __name__ == "__main__":
    rank_main(main)
