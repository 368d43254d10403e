"""What a forward kept before its tap: its gradient is an error that names the layer, and nothing else is."""

from functools import partial

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import EscapedGradientError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

MODES = [
    partial(mode, force_functorch=True)  # or nothing has to be watched: see test_shared.py
    for mode in (dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping)
]


class Keeping(nn.Module):
    """Keeps its output, a view, or a number made on the way to it. (An output that gradients go through is the tensor
    that the tap passes on: what comes to it is seen.)"""

    def __init__(self, what):
        super().__init__()
        self.weight, self.what = nn.Parameter(torch.randn(4, 4)), what

    def forward(self, x):
        hidden = x @ self.weight
        y = hidden.view(-1, 4) if self.what == "view" else torch.tanh(hidden)
        self.kept = y if self.what in ("output", "view") else (y if self.what == "made" else hidden).square().mean()
        return y


def keeping(what, first):
    """``first``: no gradient goes through the layer."""
    return nn.Sequential(nn.Identity() if first else nn.Linear(4, 4), Keeping(what))


@pytest.mark.parametrize("wrap", MODES)
@pytest.mark.parametrize(
    ("what", "first"),
    [("output", True), *((w, f) for w in ("view", "made") for f in (True, False)), ("on the way", True)],
)
@pytest.mark.parametrize("alone", [False, True])
def test_what_a_forward_kept(wrap, what, first, alone):
    net = keeping(what, first)
    model = wrap(net)
    out = model(torch.randn(3, 4))
    with pytest.raises(EscapedGradientError, match=r"1 \(Keeping\)"):
        (net[1].kept.sum() + (0.0 if alone else out.sum())).backward()
    assert getattr(net[1].weight, "grad_sample", None) is None
    model.zero_grad()
    model(torch.randn(3, 4)).sum().backward()  # nothing is left of it
    assert net[1].weight.grad is not None


@pytest.mark.parametrize("alone", [False, True])
def test_an_output_that_was_kept_is_seen(alone):
    net, x = keeping("output", first=False), torch.randn(3, 4)

    def loss(model, x):
        out = model(x).sum()
        return net_of(model)[1].kept.square().sum() + (0.0 if alone else out)

    def net_of(model):
        return getattr(model, "_module", model)

    exact = loop_over_samples(net, loss, x)
    loss(dpfast.GradSampleModule(net, loss_reduction="sum"), x).backward()
    for name, p in net.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


@pytest.mark.parametrize("first", [True, False])
def test_gradients_of_what_was_kept_and_of_inputs(first):
    """``torch.autograd.grad`` of something else than parameters loses none of theirs."""
    net = keeping("output", first)
    model = dpfast.GradSampleModule(net)
    x = torch.randn(3, 4, requires_grad=True)
    model(x)
    assert torch.autograd.grad(net[1].kept.sum(), x)[0].shape == x.shape
    model(x.detach())
    assert torch.autograd.grad(net[1].kept.sum(), net[1].kept)[0].eq(1).all()


class Cell(nn.Module):
    """One output is made of the other, one comes twice, one is the input, two come of one operation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        c = torch.tanh(x @ self.weight)
        left, right = (c * 2).chunk(2, 1)
        return torch.sigmoid(c), c, c, x, left, right


class OfCells(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.body, self.cell = nn.Identity() if first else nn.Linear(4, 4), Cell()

    def forward(self, x):
        x = self.body(x)
        h, c, d, y, left, right = self.cell(x)
        return h + c * d + y * x + torch.cat([left * right, right], 1)


@pytest.mark.parametrize("make", [lambda: OfCells(True), lambda: OfCells(False)], ids=["first", "behind"])
def test_outputs_that_hang_together(make):
    net, x = make(), torch.randn(3, 4)
    exact = loop_over_samples(net, lambda m, x: m(x).square().sum(), x)
    dpfast.GradSampleModule(net, loss_reduction="sum")(x).square().sum().backward()
    for name, p in net.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


class FromElsewhere(nn.Module):
    """A layer whose forward reaches another layer's output, and not by its inputs."""

    def __init__(self):
        super().__init__()
        self.body, self.layer = nn.Linear(4, 4), Reaching()

    def forward(self, x):
        self.layer.context = self.body(x)
        return self.layer(torch.ones(len(x), 4))


class Reaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.tanh(x * self.weight + self.context)


@pytest.mark.parametrize("wrap", MODES)
def test_a_layer_that_reaches_past_its_inputs(wrap):
    """What it reaches gets its gradient; its own cannot be taken apart by samples, which is an error."""
    net, x = FromElsewhere(), torch.randn(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    model = wrap(net)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, expected)
    with pytest.raises(UnsupportedModuleError, match=r"layer \(Reaching\)"):
        model(x).sum().backward()
