"""Weights of a layer's children that are made of others, and layers within torch.func."""

import pytest
import torch
from released import in_two_passes
from torch import nn
from torch.nn.utils import parametrize

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C, N = 0.1, 4


class LowRank(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, columns)), nn.Parameter(torch.randn(rows, 2))

    def forward(self, weight):
        return weight + self.b @ self.a


def losses(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).sum(1)


@pytest.mark.parametrize("passes", [1, 2])
def test_low_rank_weights_of_all_of_an_encoder_layer(passes):
    """nn.MultiheadAttention's last layer too, whose weight it takes without its forward."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True).requires_grad_(False)
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    model, x = model.double(), torch.randn(N, 3, 6, dtype=torch.float64)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    mode = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", passes=passes)
    found = losses(mode, x)
    in_two_passes(mode, found, "sum") if passes == 2 else found.sum().backward()
    assert relative_error(mode.get_norm_sample().double(), norms_of(exact)) < 1e-6
    for name, want in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, want) < 1e-6


class OfOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.vmap(self.layer)(x)


def test_a_layer_within_vmap_is_refused_by_name():
    mode = GradSampleModuleFastGradientClipping(OfOne(), max_grad_norm=C)
    with pytest.raises(UnsupportedModuleError, match=r"layer \(Linear\) runs within torch\.func .*on the whole batch"):
        mode(torch.randn(N, 3, 6))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_other_parameters_for_one_call(passes, known):
    """The error names them; also where layers like these have been met, and their rules are not asked again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=0.1, loss_reduction="sum", passes=passes)
    others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    if known:
        model(torch.randn(4, 5)).square().sum().backward()
        model.zero_grad()
    with pytest.raises(UnsupportedModuleError, match=r"(0|2) \(Linear\).*torch.func.functional_call"):
        torch.func.functional_call(model, others, (torch.randn(4, 5),)).square().sum().backward()
    assert all(p.grad is None for p in (*net.parameters(), *others.values()))
