"""Optimizers that step a part of what the model trains: the others' gradients are nobody's business, and what they
hold must not be counted for those that were given up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.opacus import DPOptimizerFast, PrivacyEngine
from dpfast.testing import clipped_sum, loop_over_samples

N = 8


def made(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).to(dtype)
    return net, torch.randn(N, 6, dtype=dtype), torch.randint(0, 3, (N,))


def optimizer_of(parameters, **options):
    given = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": N, **options}
    return DPOptimizerFast(torch.optim.SGD(parameters, lr=0.0), **given)


def expected(net, x, y):
    """The mean of the samples' clipped gradients."""
    found = loop_over_samples(copy.deepcopy(net), lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), x, y)
    return {name: total / N for name, total in clipped_sum(found, 1.0).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_of_the_head(dtype, set_to_none, passes):
    net, x, y = made(dtype)
    truth = expected(net, x, y)["2.weight"]
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, passes=passes)
    optimizer = optimizer_of(net[2].parameters())
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.mean().backward(retain_graph=passes == 2)
        if passes == 2:
            factors = model.get_clipping_coef()
            model.disable_hooks()
            (factors * losses).sum().backward()
            model.enable_hooks()
        optimizer.step()
        assert optimizer.accumulated_iterations == 1
        off = (net[2].weight.grad.double() - truth).norm() / truth.norm()
        assert off <= (1e-5 if dtype != torch.bfloat16 else 5e-2)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_two_optimizers_that_step_at_different_times(set_to_none):
    net, x, y = made()
    truth = expected(net, x, y)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0)
    head, rest = optimizer_of(net[2].parameters()), optimizer_of(net[0].parameters())
    for step in range(4):
        head.zero_grad(set_to_none)
        F.cross_entropy(model(x), y).backward()
        head.step()
        assert torch.allclose(net[2].weight.grad.double(), truth["2.weight"], atol=1e-6)
        if step % 2:  # a mean over the two passes
            rest.step()
            assert torch.allclose(net[0].weight.grad.double(), truth["0.weight"], atol=1e-6)
            rest.zero_grad(set_to_none)


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass"])
def test_the_accountant_counts_steps(mode):
    net, x, y = made()
    loader, engine = DataLoader(TensorDataset(x.repeat(4, 1), y.repeat(4)), batch_size=N), PrivacyEngine()
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": mode, "poisson_sampling": False}
    if mode == "dpfast_two_pass":
        given["criterion"] = nn.CrossEntropyLoss()
    sgd = torch.optim.SGD(net[2].parameters(), lr=0.1)
    model, optimizer, *rest = engine.make_private(module=net, optimizer=sgd, data_loader=loader, **given)
    criterion = rest[0] if mode == "dpfast_two_pass" else F.cross_entropy
    for _ in range(6):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 0.25, 6)] and engine.get_epsilon(1e-5) < 10.0
