"""Two processes on a CPU (gloo), each with half of the batch, as Opacus's DPDDP does it."""

import subprocess
import sys

import opacus_distributed_worker
import pytest
import torch
from cases import assert_gradients, sum_loss
from opacus_cases import opacus_example
from opacus_distributed_worker import MODES, NOISE_SEED, C, N

from dpfast.testing import clipped_sum, loop_over_samples

pytestmark = pytest.mark.on_cpu


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """[rank][mode, what] -> gradients by name."""
    folder = tmp_path_factory.mktemp("distributed")
    outs = [folder / f"{rank}.pt" for rank in (0, 1)]
    command = [sys.executable, opacus_distributed_worker.__file__]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder / "store"), str(out)], stderr=subprocess.PIPE, text=True)
        for rank, out in enumerate(outs)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=900)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(out) for out in outs]


def exact_sum(mode):
    """As if one process had the whole batch."""
    model, x, y = opacus_example("mlp", N)
    samples = loop_over_samples(model, sum_loss, x, y)
    if mode != "per layer":
        return clipped_sum(samples, C)
    return {name: clipped_sum({name: g}, C)[name] for name, g in samples.items()}


@pytest.mark.parametrize("mode", MODES)
def test_both_processes_get_the_clipped_gradient_of_the_whole_batch(gradients, mode):
    exact = exact_sum(mode)
    for rank in gradients:
        assert_gradients(rank[mode, "sum"], exact)
        assert_gradients(rank[mode, "mean"], {name: g / N for name, g in exact.items()})


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("dpfast")])
def test_skipped_steps_add_up(gradients, mode):
    exact = {name: g / N for name, g in exact_sum(mode).items()}
    for rank in gradients:
        assert_gradients(rank[mode, "skipped"], exact)


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_added_once(gradients, mode):
    """That of the first process's generator, and the second process draws none."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    sensitivity = C * 6**0.5 if mode == "per layer" else C
    noise = {
        name: torch.normal(0.0, sensitivity, p.shape, generator=generator)
        for name, p in opacus_example("mlp", N)[0].named_parameters()
    }
    expected = {name: g / N + noise[name] / N for name, g in exact_sum(mode).items()}
    for rank in gradients:
        assert_gradients(rank[mode, "noise"], expected)
