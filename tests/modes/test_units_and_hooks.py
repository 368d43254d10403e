"""Hooks that are taken off and put on again within units(...): what follows is still of units, not of samples."""

import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping, explain
from dpfast.testing import loop_over_samples, norms_of, relative_error

N, UNITS, C = 6, 2, 0.5
IDS = torch.tensor([0, 0, 1, 0, 1, 1])


def loss(model, x):
    return torch.sin(3.0 * model(x)).sum()


def made():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(N, 4)
    exact = loop_over_samples(net, loss, x)
    units = {name: torch.stack([g[u == IDS].sum(0) for u in range(UNITS)]) for name, g in exact.items()}
    return GradSampleModuleFastGradientClipping(net, loss_reduction="sum", max_grad_norm=C), x, units


def check(wrapped, units):
    norms = norms_of(units)
    assert relative_error(wrapped.get_norm_sample(), norms) <= 1e-5
    factors = (C / norms).clamp(max=1.0)
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad, torch.einsum("n,n...->...", factors, units[name])) <= 1e-3, name


def test_hooks_put_on_again():
    wrapped, x, units = made()
    with wrapped.units(IDS, UNITS):
        wrapped(x)
        wrapped.remove_hooks()
        wrapped.add_hooks(loss_reduction="sum")
        loss(wrapped, x).backward()
    check(wrapped, units)


def test_explained_within():
    wrapped, x, units = made()
    with wrapped.units(IDS, UNITS):
        assert explain(wrapped, x).num_samples in (N, UNITS)
        loss(wrapped, x).backward()
    check(wrapped, units)
