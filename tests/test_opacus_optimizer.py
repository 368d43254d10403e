"""DPOptimizerFast against Opacus's own optimizer, and the noise it adds."""

import copy

import pytest
import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from torch import nn

from dpfast.opacus_optimizer import DPOptimizerFast


def model_with_gradients(dtype=torch.float32, width=5):
    model = nn.Linear(width, 7).to(dtype)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(dtype)
    return model


def optimizer_of(cls, model, sigma=0.0, seed=0, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    options = {"max_grad_norm": 2.0, "expected_batch_size": 8, "generator": generator, **options}
    return cls(sgd, noise_multiplier=sigma, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sigma", [0.0, 1.5])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_steps_as_opacus_to_the_bit(reduction, sigma, secure, dtype):
    theirs = model_with_gradients(dtype)
    ours = copy.deepcopy(theirs)
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        q.grad = p.grad.clone()
    options = {"loss_reduction": reduction, "secure_mode": secure}
    optimizer_of(DPOptimizerFastGradientClipping, theirs, sigma, **options).step()
    optimizer_of(DPOptimizerFast, ours, sigma, **options).step()
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)


def test_mean_and_variance_of_the_noise():
    model = nn.Linear(500, 400)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    optimizer_of(DPOptimizerFast, model, sigma=1.5, loss_reduction="sum").pre_step()
    noise = model.weight.grad - 3.0
    n, std = noise.numel(), 1.5 * 2.0
    assert abs(noise.mean()) < 5 * std / n**0.5
    assert abs(noise.var() / std**2 - 1) < 5 * (2 / n) ** 0.5


def test_the_generator_decides_the_noise():
    model = model_with_gradients()
    runs = []
    for seed in (1, 1, 2):
        own = copy.deepcopy(model)
        for p, q in zip(model.parameters(), own.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer_of(DPOptimizerFast, own, sigma=1.0, seed=seed).pre_step()
        runs.append(own.weight.grad)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_skipped_steps_add_up_without_noise():
    model = model_with_gradients()
    first = model.weight.grad.clone()
    optimizer = optimizer_of(DPOptimizerFast, model, sigma=0.0, loss_reduction="sum")
    optimizer.signal_skip_step(True)
    optimizer.step()
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.signal_skip_step(False)
    optimizer.pre_step()
    assert torch.equal(model.weight.grad, first + 1.0)


def test_a_sum_is_used_once():
    model = model_with_gradients()
    optimizer = optimizer_of(DPOptimizerFast, model, sigma=1.0)
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()
