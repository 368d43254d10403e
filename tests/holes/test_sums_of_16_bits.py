"""Clipped sums of parameters of 16 bits are rounded as a whole, which moves them by more than a sample may: a warning
says so once, and nothing of it is there with parameters in fp32."""

import warnings

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning

C = 1.0


def clipping(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", **options)


def summed(model, n):
    model.zero_grad()
    model(torch.ones(n, 1, dtype=next(model.parameters()).dtype)).sum().backward()
    return next(model.parameters()).grad.double().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_one_sample_more_moves(dtype):
    """As docs/bounds.md has it: C and an eps of the sum; with fp32 no more than C."""
    model, eps = clipping(nn.Linear(1, 1, bias=False).to(dtype)), torch.finfo(dtype).eps
    with pytest.warns(DpfastWarning, match=rf"trains parameters in {dtype}.* Train parameters in fp32"):
        summed(model, 2)
    moves = [abs(summed(model, n) - summed(model, n - 1)) for n in range(250, 300)]
    moves += [abs(summed(model, n) - summed(model, n - 1)) for n in range(4190, 4200)]
    assert max(moves) > 2.0 * C
    assert max(moves) <= C + eps * 4200 * C
    model = clipping(nn.Linear(1, 1, bias=False))
    assert max(abs(summed(model, n) - summed(model, n - 1)) for n in (300, 4200)) <= C


def step(model, x):
    model(x).float().square().sum(1).mean().backward()


def test_it_is_said_once_where_it_is_so():
    x = torch.randn(5, 4)
    with pytest.warns(DpfastWarning, match=r"Linear trains parameters in torch.bfloat16") as said:
        model = clipping(nn.Linear(4, 3).bfloat16())
        for _ in range(3):
            step(model, x.bfloat16())
    assert len([w for w in said if "trains parameters in" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = clipping(nn.Linear(4, 3))
        with torch.autocast("cpu", torch.bfloat16):
            step(model, x)
        frozen = nn.Sequential(nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 3))
        frozen[0].register_forward_hook(lambda module, args, output: output.float())
        step(clipping(frozen), x.bfloat16())


def test_other_ways_say_it_too():
    x = torch.randn(5, 4).bfloat16()
    compiled = dpfast.compile_step(
        nn.Linear(4, 3).bfloat16(), lambda m, x: m(x).float().sum(1), max_grad_norm=C, batch_size=5, backend="eager"
    )
    with pytest.warns(DpfastWarning, match=r"Linear trains parameters in torch.bfloat16"):
        compiled(x)
    net = nn.Linear(4, 3).bfloat16()
    clipper = dpfast.PerSampleGradientClipper(net, dpfast.ConstantFlatClipper(C))
    step(net, x)
    clipper.clip_and_accumulate()
    with pytest.warns(DpfastWarning, match=r"Linear trains parameters in torch.bfloat16"):
        clipper.pre_step()
