"""RMS norms without an eps of their own, of inputs so small that torch's counts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast

N, T, D = 4, 5, 8
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


class Function(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [nn.RMSNorm, Function])
def test_without_an_eps(build, dtype):
    torch.manual_seed(0)
    x = (torch.randn(N, T, D) * 0.03).to(dtype)
    d, eps = x.double(), torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    exact = (d / (d.square().mean(-1, keepdim=True) + eps).sqrt()).sum(1)
    model = dpfast.GradSampleModule(build(D).to(dtype), loss_reduction="sum")
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(model._module.weight.grad_sample.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", [nn.RMSNorm, Function])
def test_in_autocast(build):
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(D, D), build(D)), torch.randn(N, T, D)
    nn.init.normal_(plain[0].weight, std=0.01)
    nn.init.zeros_(plain[0].bias)
    model = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=1e6, loss_reduction="sum")
    for module in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.float().sum().backward()
    torch.testing.assert_close(model._module[1].weight.grad, plain[1].weight.grad, rtol=0.02, atol=0.02)
