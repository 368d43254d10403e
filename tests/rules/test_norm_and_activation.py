"""A group norm with its activation, as timm has them in one module, against a loop over samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.taps import Meeting, find_forward
from dpfast.testing import check_rule, loop_over_samples


class GroupNormAct(nn.GroupNorm):
    """As timm's own, of which dpfast knows no more than the name."""

    def __init__(self, channels, groups=2, *, act=None, drop=None, fast=False):
        super().__init__(groups, channels)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.ReLU(inplace=True) if act is None else act
        self._fast_norm = fast

    def forward(self, x):
        if self._fast_norm:
            x = fast_group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        else:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        x = self.act(x)
        return x


GroupNormAct.__module__ = "timm.layers.norm_act"


def fast_group_norm(x, groups, weight, bias, eps):
    """As timm's."""
    if torch.is_autocast_enabled("cpu"):
        to = torch.get_autocast_dtype("cpu")
        x, weight, bias = x.to(to), weight.to(to), bias.to(to)
    with torch.amp.autocast("cpu", enabled=False):
        return F.group_norm(x, groups, weight, bias, eps)


class Twice(GroupNormAct):
    def forward(self, x):
        return 2.0 * super().forward(x)


def layer(**options):
    torch.manual_seed(0)
    made = GroupNormAct(6, **options)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def with_function(made):
    del made.act
    made.act = torch.tanh
    return made


CASES = {
    "ReLU in place": (layer, (6, 8, 8)),
    "one group": (lambda: layer(groups=1), (6, 7)),
    "two values a group": (lambda: layer(groups=6), (6, 2)),
    "dropout": (lambda: layer(drop=nn.Dropout(0.0), act=nn.GELU()), (6, 5, 4)),
    "frozen bias": (lambda: frozen(layer()), (6, 5, 4)),
}


def frozen(made):
    made.bias.requires_grad_(False)
    return made


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name):
    make, shape = CASES[name]
    assert find_forward(make()) is not None
    check_rule(make(), torch.randn(5, *shape))


@pytest.mark.parametrize("name", CASES)
def test_the_output_has_the_layers_bits_and_nothing_is_followed(name, monkeypatch):
    make, shape = CASES[name]
    own, x = make(), torch.randn(5, *shape)
    expected = own(x)
    monkeypatch.setattr(Meeting, "__init__", None)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(own, max_grad_norm=1.0)
    output = wrapped(x)
    assert torch.equal(output, expected)
    output.square().mean().backward()


OTHERS = {
    "an activation with parameters": lambda: layer(act=nn.PReLU(6)),
    "one within others": lambda: layer(act=nn.Sequential(nn.PReLU(6))),
    "in autocast's dtype": lambda: layer(fast=True),
    "an activation that is no module": lambda: with_function(layer()),
    "a forward of its own": lambda: Twice(6),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_group_norm_goes_the_general_way(name):
    assert find_forward(OTHERS[name]()) is None
    model, x = nn.Sequential(OTHERS[name](), nn.Flatten(), nn.Linear(30, 2)), torch.randn(4, 6, 5)

    def losses(m, x):
        return m(x).square().sum()

    truth = loop_over_samples(model, losses, x, dtype=torch.float64)
    norms = sum(g.flatten(1).square().sum(1) for g in truth.values()).sqrt()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    losses(wrapped, x).backward()
    assert torch.allclose(wrapped.get_norm_sample().double(), norms, rtol=1e-5)
    for name, p in model.named_parameters():
        clipped = torch.einsum("n,n...->...", (1.0 / norms).clamp(max=1.0), truth[name])
        assert (p.grad - clipped).norm() <= 1e-5 * clipped.norm() + 1e-6


def test_a_layer_that_mixes_samples_behind_the_norm_is_refused():
    class Mixing(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    with pytest.raises(UnsupportedModuleError):
        wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Sequential(layer(act=Mixing())), max_grad_norm=1.0)
        wrapped(torch.randn(4, 6, 5)).sum().backward()
