"""One of two processes: private steps with DPDDP on every second sample. Run by tests/opacus/test_distributed.py.

python distributed_worker.py RANK STORE OUT
"""

import sys
import warnings

import opacus
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus_cases import opacus_example
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpfast.opacus

N, C, NOISE_SEED = 8, 0.5, 7
MODES = ("dpfast", "dpfast_two_pass", "dpfast_materialize", "per layer", "ghost", "ghost, installed")


def step(mode, sigma, reduction="mean", skipped=False):
    """The gradients that SGD gets, by name."""
    rank = dist.get_rank()
    model, x, y = opacus_example("mlp", N)
    with torch.no_grad():  # DPDDP gives every process the first one's weights
        for p in model.parameters():
            p += rank
    data = TensorDataset(x, y)
    kind = mode.partition(",")[0]
    if mode.endswith("installed"):
        dpfast.opacus.install()
    engine = (opacus if kind == "ghost" else dpfast.opacus).PrivacyEngine()
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    per_layer = mode == "per layer"
    module, optimizer, *made, _ = engine.make_private(
        module=DPDDP(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=N // 2, sampler=DistributedSampler(data)),
        noise_multiplier=sigma,
        max_grad_norm=[C] * 6 if per_layer else C,
        clipping="per_layer" if per_layer else "flat",
        poisson_sampling=False,
        criterion=criterion,
        loss_reduction=reduction,
        grad_sample_mode="dpfast" if per_layer else kind,
        noise_generator=torch.Generator().manual_seed(NOISE_SEED + rank),
    )
    criterion = made[0] if made else criterion
    own = torch.arange(rank, N, 2)
    for part in own.split(len(own) // 2 if skipped else len(own)):
        optimizer.zero_grad()
        criterion(module(x[part]), y[part]).backward()
        optimizer.signal_skip_step(skipped and part[-1] != own[-1])
        optimizer.step()
    dpfast.opacus.uninstall()
    return {name: p.grad for name, p in model.named_parameters()}


def main(rank, store, out):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    found = {}
    for mode in MODES:
        found[mode, "mean"] = step(mode, 0.0)
        found[mode, "sum"] = step(mode, 0.0, "sum")
        found[mode, "noise"] = step(mode, 1.0)
        if mode.startswith("dpfast"):
            found[mode, "skipped"] = step(mode, 0.0, skipped=True)
    torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
