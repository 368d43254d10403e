"""torch.distributed.checkpoint: a run of two ranks is killed in the middle of a step and goes on with three."""

import os
import subprocess
import sys

import checkpoint_worker
import pytest
import torch
from cases import assert_gradients
from torch import nn

from dpfast.distributed import PoissonBatches, SharedSecret
from dpfast.errors import InputError
from dpfast.opacus import DPOptimizerFast, PrivateState


def start(folder, phase, ranks):
    # They stand on the CPU, also where there is a GPU: torch.distributed would take that for its own.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    outs = [str(folder / f"{phase}{rank}.pt") for rank in range(ranks)]
    store, checkpoint = str(folder / f"{phase}.store"), str(folder / "checkpoint")
    processes = [
        subprocess.Popen(
            [sys.executable, checkpoint_worker.__file__, str(rank), str(ranks), store, out, checkpoint, phase],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        ends = [(process.communicate(timeout=900)[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return ends, outs


@pytest.mark.on_cpu
def test_a_killed_run_goes_on_with_another_number_of_ranks(tmp_path):
    ends, outs = start(tmp_path, "killed", 2)
    assert ends[1][1] == -9, ends[1][0][-3000:]
    assert ends[0][1] > 0, "the other rank ended without an error"
    weights, epsilon, steps, batch = torch.load(outs[0])
    ends, outs = start(tmp_path, "resumed", 3)
    for rank, (errors, code) in enumerate(ends):
        assert code == 0, errors[-3000:]
        found = torch.load(outs[rank])
        assert found[1:4] == (epsilon, steps, batch)
        assert_gradients(found[0], {name: w.double() for name, w in weights.items()})
        assert "another secret" in found[4]


def optimizer_of(secret):
    model = nn.Linear(2, 2)
    return DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        secret=secret,
    )


class Accountant:
    def state_dict(self):
        return {"history": []}


def test_what_could_not_be_taken_again_is_refused():
    with pytest.raises(InputError, match="give it secret="):
        PrivateState(optimizer_of(None), Accountant())
    secret = SharedSecret(bytes(32))
    batches = PoissonBatches(10, 0.5, secret, rank=0, ranks=1)
    saved = PrivateState(optimizer_of(secret), Accountant(), batches).state_dict()
    second = PrivateState(optimizer_of(secret), Accountant(), batches)  # whose noise is another
    with pytest.raises(InputError, match="another of its optimizers"):
        second.load_state_dict(saved)
