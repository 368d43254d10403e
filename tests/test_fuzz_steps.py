"""The first promise through whole steps, on cases drawn to break it: 300 of each here, 10,000 of each with `make fuzz`.

In each batch one sample alone has a gradient, so ``p.grad`` is what it adds. Every layer has T = 1, where each entry of
a sample's gradient is one product: the certificate then covers ``p.grad`` itself, roundings included.
"""

import functools
import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from released import gradients, in_two_passes, keeps_or_refuses, norm_over
from torch import nn

from dpfast import AutomaticClipper, ConstantFlatClipper, ConstantPerLayerClipper, GradSampleModuleFastGradientClipping

pytestmark = pytest.mark.filterwarnings("ignore:.* of .* samples")


class Tiny(nn.Module):
    """Many layers of one weight, whose gradients stand side by side in the norm."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=i % 3 == 0) for i in range(layers))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def mlp(widths):
    layers = [layer for d, p in itertools.pairwise(widths) for layer in (nn.Linear(d, p), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def wrap(model, c, passes, clipper, reduction):
    norm_clipper = {
        "flat": None,
        "automatic": AutomaticClipper(c),
        "per layer": ConstantPerLayerClipper(
            [c / math.sqrt(len(list(model.parameters())))] * len(list(model.parameters()))
        ),
        "given": ConstantFlatClipper(c),
    }[clipper]
    return GradSampleModuleFastGradientClipping(
        model, max_grad_norm=c, passes=passes, norm_clipper=norm_clipper, loss_reduction=reduction
    )


def released(model, x, size, n, reduction, dtype=None):
    """‖p.grad‖ / C of a step in which sample 0 alone counts; 0 where dpfast refuses the step."""
    alone = torch.zeros(n, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    alone[0] = size

    def step():
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(x)
        losses = outputs.to(alone.dtype).square().sum(1) * alone
        if model.passes == 2:
            in_two_passes(model, losses, reduction)
        else:
            getattr(losses, reduction)().backward()

    return keeps_or_refuses(step, model, model.sensitivity)


ORDERS = st.floats(-18, 18).map(lambda e: 10.0**e)
WHOLE = {
    "c": st.floats(-12, 12).map(lambda e: 10.0**e),
    "inputs": ORDERS,
    "size": ORDERS,
    "n": st.integers(1, 40),
    "passes": st.sampled_from([1, 2]),
    "reduction": st.sampled_from(["mean", "sum"]),
    "seed": st.integers(0, 10**6),
}


@given(
    **WHOLE,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    clipper=st.sampled_from(["flat", "given", "automatic", "per layer"]),
)
def test_extremes_of_scale(c, inputs, size, n, passes, reduction, seed, dtype, clipper):
    """Factors from 1e-36 to 1, subnormal ones and sums of squares that overflow among them."""
    torch.manual_seed(seed)
    passes = 1 if clipper == "per layer" else passes
    model = wrap(mlp([3, 5, 2]).to(dtype), c, passes, clipper, reduction)
    x = torch.randn(n, 3, dtype=dtype) * inputs
    assert released(model, x, size, n, reduction) <= 1.0 + 1e-9


@given(**WHOLE, dtype=st.sampled_from([torch.bfloat16, torch.float16]), autocast=st.booleans())
def test_modes_of_16_bits(c, inputs, size, n, passes, reduction, seed, dtype, autocast):
    """Parameters in 16 bits, and fp32 ones under autocast, at scales where gradients underflow and overflow."""
    torch.manual_seed(seed)
    model = wrap(mlp([4, 6, 3]).to(torch.float32 if autocast else dtype), c, passes, "flat", reduction)
    x = (torch.randn(n, 4) * inputs ** (1 / 4)).to(torch.float32 if autocast else dtype)
    assert released(model, x, size ** (1 / 4), n, reduction, dtype if autocast else None) <= 1.0 + 1e-9


@functools.cache
def tiny(layers, passes, reduction):
    """Wrapped once: with 400 layers that takes a hundred times what a step does."""
    return wrap(Tiny(layers), 1.0, passes, "flat", reduction)


@given(
    **WHOLE,
    layers=st.sampled_from([1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 400]),
    fresh=st.booleans(),
)
def test_many_tiny_layers(c, inputs, size, n, passes, reduction, seed, layers, fresh):
    """In a model's first step, and in one after others that had other weights, samples and limits."""
    torch.manual_seed(seed)
    if fresh:
        model = wrap(Tiny(min(layers, 17)), c, passes, "flat", reduction)
    else:
        model = tiny(layers, passes, reduction)
        model.zero_grad()
        model.max_grad_norm = c
        for p in model.parameters():
            nn.init.uniform_(p, -1.0, 1.0)
    assert released(model, torch.randn(n, 1) * inputs ** (1 / 3), size ** (1 / 3), n, reduction) <= 1.0 + 1e-9


@given(**{**WHOLE, "inputs": st.floats(-3, 3).map(lambda e: 10.0**e), "size": st.floats(-3, 3).map(lambda e: 10.0**e)})
def test_two_passes_against_one(c, inputs, size, n, passes, reduction, seed):
    """The same clipped sum of all samples, whichever way it is taken."""
    torch.manual_seed(seed)
    net, x, weights = mlp([3, 5, 2]), torch.randn(n, 3) * inputs, torch.rand(n) * size
    sums = []
    for k in (1, 2):
        model = wrap(net, c, k, "flat", reduction)
        losses = model(x).square().sum(1) * weights
        if k == 2:
            in_two_passes(model, losses, reduction)
        else:
            getattr(losses, reduction)().backward()
        sums.append(torch.cat([g.flatten() for g in gradients(model)]).double())
        model.zero_grad()
        model.to_standard_module()
    one, two = sums
    assert (one - two).norm() <= 1e-5 * one.norm() + 1e-30
    assert norm_over([two], c * n) <= 1.0 + 1e-5
