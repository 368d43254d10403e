"""One rank of tests/opacus/test_checkpoint.py: a run that is killed in the middle of a step, or goes on from its
checkpoint."""

import os
import signal
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_worker import Model as Transformer
from fsdp_worker import losses, shard, whole
from opacus.accountants import RDPAccountant
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dpfast
from dpfast.distributed import PoissonBatches, SharedSecret
from dpfast.opacus import DPOptimizerFast, PrivateState

SAMPLES, RATE, SAVED, STEPS = 24, 0.25, 2, 4


class Run:
    def __init__(self, secret=bytes(range(32))):
        torch.manual_seed(0)
        self.x, self.y = torch.randint(13, (2, SAMPLES, 5))
        self.model = shard(Transformer())
        self.module = dpfast.GradSampleModuleFastGradientClipping(self.model, loss_reduction="sum", max_grad_norm=0.5)
        secret = SharedSecret(secret)
        self.batches = PoissonBatches(SAMPLES, RATE, secret, steps=STEPS)
        self.optimizer = DPOptimizerFast(
            torch.optim.Adam(self.model.parameters(), lr=0.01),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            expected_batch_size=RATE * SAMPLES,
            secret=secret,
        )
        self.accountant = RDPAccountant()
        self.optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=RATE))
        self.private = PrivateState(self.optimizer, self.accountant, self.batches)

    def step(self):
        taken = self.batches.batch(self.batches.step)
        self.batches.step += 1
        self.optimizer.zero_grad()
        losses(self.module, self.x[taken], self.y[taken]).sum().backward()
        self.optimizer.step()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer.original_optimizer)
        return {"model": model, "optimizer": optimizer, "private": self.private}

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer.original_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def found(self):
        weights = {name: whole(p) for name, p in self.model.named_parameters()}
        return weights, self.accountant.get_epsilon(1e-5), self.optimizer.noised_steps, self.batches.step


def uninterrupted_and_killed(folder, out):
    run = Run()
    for _ in range(STEPS):
        run.step()
    torch.save(run.found(), out)
    del run  # or the next one, of the same secret, would have other noise
    run = Run()
    for _ in range(SAVED):
        run.step()
    dcp.save(run.state(), checkpoint_id=folder)
    if dist.get_rank() == 1:  # in the middle of the backward pass
        run.model.blocks[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run.step()


def resumed(folder, out):
    run = Run()
    run.load(folder)
    while run.batches.step < STEPS:
        run.step()
    other, error = Run(bytes(32)), ""
    try:
        other.load(folder)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    torch.save((*run.found(), error), out)


def main():
    rank, ranks, store, out, folder, phase = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    (resumed if phase == "resumed" else uninterrupted_and_killed)(folder, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
