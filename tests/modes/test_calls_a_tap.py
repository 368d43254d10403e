"""How many calls of Python and of C one layer more makes of a step: much of what a step of many layers takes."""

import pytest
import torch
import torch.nn.functional as F
from calls_made import calls_of
from torch import nn

import dpfast


class GroupNormAct(nn.GroupNorm):
    """As timm's."""

    def __init__(self):
        super().__init__(2, 8)
        self.drop, self.act, self._fast_norm = nn.Identity(), nn.ReLU(inplace=True), False

    def forward(self, x):
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return self.act(self.drop(x))


class StdConv2d(nn.Conv2d):
    """As timm's."""

    def __init__(self, kernel):
        super().__init__(8, 8, kernel, padding=kernel // 2, bias=False)
        self.eps = 1e-6

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, 8, -1), None, None, training=True, momentum=0.0, eps=self.eps)
        return F.conv2d(x, weight.reshape_as(self.weight), None, 1, self.padding)


GroupNormAct.__module__, StdConv2d.__module__ = "timm.layers.norm_act", "timm.layers.std_conv"

LAYERS = {
    "group norm and activation": (GroupNormAct, 600),
    "standardised weights": (lambda: StdConv2d(3), 740),
    "standardised weights of pixels": (lambda: StdConv2d(1), 780),
}


def calls_of_a_step(make, layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *(make() for _ in range(layers)), nn.Flatten(), nn.Linear(512, 2))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    x = torch.randn(4, 3, 8, 8)

    def step():
        model.zero_grad()
        wrapped(x).square().mean().backward()

    return [calls_of(step) for _ in range(3)][-1]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_no_more_calls(name):
    make, most = LAYERS[name]
    few, many = (calls_of_a_step(make, layers) for layers in (2, 6))
    assert (many - few) / 4 <= most
