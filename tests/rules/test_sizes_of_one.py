"""Layers of one channel, feature, position or row, whose strides torch takes for whatever it likes: what reads their
memory as if it were contiguous has read what lies behind it."""

import copy

import pytest
import torch
from torch import nn

import dpfast
from dpfast.testing import clipped_sum, loop_over_samples

LAYERS = {
    "linear": (lambda: nn.Linear(1, 1), (1,)),
    "linear, a feature to many": (lambda: nn.Linear(1, 5), (4, 1)),
    "linear, many to one": (lambda: nn.Linear(5, 1), (1, 5)),
    "bilinear": (lambda: Twice(nn.Bilinear(1, 1, 1)), (3, 1)),
    "group norm": (lambda: nn.GroupNorm(1, 1), (1, 5, 4)),
    "group norm of one column": (lambda: nn.GroupNorm(1, 1), (1, 5, 1)),
    "group norm of one position": (lambda: nn.GroupNorm(1, 3), (3, 1, 1)),
    "instance norm": (lambda: nn.InstanceNorm2d(1, affine=True), (1, 3, 4)),
    "layer norm of one row": (lambda: nn.LayerNorm(5), (1, 5)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((1, 5)), (3, 1, 5)),
    "RMS norm": (lambda: nn.RMSNorm(1), (3, 1)),
    "embedding": (lambda: Indices(nn.Embedding(1, 1)), (4,)),
    "embedding of one feature": (lambda: Indices(nn.Embedding(3, 1)), (1,)),
    "convolution": (lambda: nn.Conv2d(1, 1, 1), (1, 3, 4)),
    "convolution of one position": (lambda: nn.Conv2d(1, 2, 3, padding=1), (1, 1, 1)),
    "convolution of one row": (lambda: nn.Conv2d(2, 1, (1, 3)), (2, 1, 6)),
    "depthwise": (lambda: nn.Conv1d(1, 1, 3, groups=1), (1, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(1, 1, 2), (1, 2, 1)),
    "PReLU": (lambda: nn.PReLU(1), (1, 4)),
    "LSTM": (lambda: Outputs(nn.LSTM(1, 1, batch_first=True)), (1, 1)),
    "attention": (lambda: ToItself(nn.MultiheadAttention(1, 1, batch_first=True)), (3, 1)),
}


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, 2.0 * x)


class Indices(Twice):
    def forward(self, x):
        return self.layer((x.abs() * 10.0).long() % self.layer.num_embeddings)


class Outputs(Twice):
    def forward(self, x):
        return self.layer(x)[0]


class ToItself(Twice):
    def forward(self, x):
        return self.layer(x, x, x)[0]


def losses(model, x):
    y = model(x)
    weights = torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape)
    return ((y + 1.0).pow(2) * weights).flatten(1).sum(1)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_every_mode_gives_what_a_loop_over_samples_gives(name, n):
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = build(), torch.randn(n, *shape)
    with torch.no_grad():
        for p in layer.parameters():
            p.uniform_(0.5, 1.5)
        expected = layer(x)
    grads = loop_over_samples(layer, lambda model, x: losses(model, x).sum(), x)
    limit = max(1e-3, 0.5 * max(g.double().norm().item() for g in grads.values()) / n)
    sums = clipped_sum(grads, limit)

    hooked = dpfast.GradSampleModule(copy.deepcopy(layer))
    one_pass = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(layer), max_grad_norm=limit)
    for _ in range(2):  # the second time as is known from the first
        for module in (hooked, one_pass):
            module.zero_grad()
            torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
            losses(module, x).mean().backward()
        for key, p in hooked._module.named_parameters():
            torch.testing.assert_close(p.grad_sample.double(), grads[key].double(), rtol=1e-4, atol=1e-4)
        for key, p in one_pass._module.named_parameters():
            torch.testing.assert_close(p.grad.double(), sums[key].double(), rtol=1e-3, atol=1e-4)
