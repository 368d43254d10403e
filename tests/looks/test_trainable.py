"""Parameters are frozen and trained again between steps: what has been learned of a forward with other ones frozen is
not taken for this one's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from released import gradients, in_two_passes
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import EscapedGradientError
from dpfast.looks import probe
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C = 0.05


class WithGain(nn.Linear):
    """Its weight and its gain meet before either meets samples."""

    def __init__(self, d, p):
        super().__init__(d, p)
        self.gain = nn.Parameter(torch.rand(p, 1))

    def forward(self, x):
        return F.linear(x, self.weight * self.gain, self.bias)


class Standardised(nn.Conv2d):
    def __init__(self, d, p):
        super().__init__(d, p, 3)
        self.gain = nn.Parameter(torch.rand(p))

    def forward(self, x):
        rows = self.weight.view(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, self.gain * 0.3, training=True).view_as(self.weight)
        return F.conv2d(x, weight, self.bias)


class Functions(nn.Module):
    """Parameters by themselves, and a layer's weight beside the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale, self.positions = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        return self.layer(x * self.scale) + self.positions + F.linear(x, self.layer.weight)


MODELS = {
    "gain": (lambda: WithGain(6, 4), (6,), ["weight", "bias", "gain"]),
    "standardised": (lambda: Standardised(3, 8), (3, 5, 5), ["weight", "bias", "gain"]),
    "functions": (Functions, (6,), ["scale", "positions", "layer.weight"]),
}
CASES = [(name, parameter) for name, (_, _, parameters) in MODELS.items() for parameter in parameters]


def sum_of_squares(model, x):
    return model(x).square().sum()


def step(model, x):
    model.zero_grad()
    if getattr(model, "passes", 1) == 2:
        in_two_passes(model, model(x).square().flatten(1).sum(1), "sum")
    else:
        sum_of_squares(model, x).backward()


def check(model, net, x):
    """What a step leaves is that of the samples, one by one."""
    step(model, x)
    exact = loop_over_samples(copy.deepcopy(model).to_standard_module(), sum_of_squares, x)
    by_sample = not isinstance(model, GradSampleModuleFastGradientClipping)
    for name, expected in (exact if by_sample else clipped_sum(exact, C)).items():
        p = net.get_parameter(name)
        assert relative_error(p.grad_sample if by_sample else p.grad, expected) < 1e-3, name


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_frozen_in_some_steps(name, parameter, passes):
    """A gain that was frozen in the first step had a gradient of zero in all later ones, and nothing said so; of what
    was frozen later, or used functionally, it was an error."""
    make, shape, _ = MODELS[name]
    for frozen in ([True, False], [False, True, False]):
        torch.manual_seed(0)
        net = make()
        if passes == 0:
            model = GradSampleModule(net, loss_reduction="sum")
        else:
            model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum", passes=passes)
        for is_frozen in frozen:
            net.get_parameter(parameter).requires_grad_(not is_frozen)
            check(model, net, torch.randn(3, *shape))


def test_more_ways_of_freezing_than_are_looked_at(monkeypatch):
    """The layers are then as they were with others frozen; what is not known by its way is an error, never lost."""
    monkeypatch.setattr(probe, "_MOST_LOOKS", 1)
    net = nn.Sequential(nn.Linear(6, 6), WithGain(6, 4))
    net[1].gain.requires_grad_(False)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum")
    check(model, net, torch.randn(3, 6))
    net[0].weight.requires_grad_(False)
    check(model, net, torch.randn(6, 6))  # as many samples as features: where they are is still known
    net[1].gain.requires_grad_(True)
    with pytest.raises(EscapedGradientError, match="WithGain"):
        step(model, torch.randn(3, 6))


@pytest.mark.parametrize(
    ("function", "weight", "inputs"),
    [
        (F.linear, (4, 6), (3, 6)),
        (F.linear, (4, 6), (3, 5, 6)),
        (F.conv1d, (4, 6, 1), (3, 6, 7)),
        (F.conv2d, (4, 6, 3, 3), (3, 6, 5, 5)),
        (F.conv_transpose2d, (6, 4, 3, 3), (3, 6, 5, 5)),
    ],
)
def test_biases_of_functions_alone(function, weight, inputs):
    """Of a function whose weight is frozen; "'NoneType' object has no attribute" was all that was said."""
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(weight), False), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return function(x, self.weight, self.bias)

    net = Layer()
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum")
    check(model, net, torch.randn(inputs))
    assert len([g for g in gradients(model) if g is not None]) == 1
