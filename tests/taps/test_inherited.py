"""A subclass, or a layer, that changes a method which its class's forward runs computes another function."""

import pytest
import torch
import torch.nn.functional as F
from released import in_two_passes
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import InputError
from dpfast.taps import find_forward, find_rule
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C, N = 0.1, 4


class Normalised(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, F.normalize(weight.flatten(1), dim=1).view_as(weight), bias)


class Causal(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(F.pad(x, (2, 0)), weight, bias)


class LouderInstanceNorm(nn.InstanceNorm1d):
    def _apply_instance_norm(self, x):
        return super()._apply_instance_norm(x) * 3


class Shorter(nn.ConvTranspose1d):
    def _output_padding(self, *args, **kwargs):
        return [1]


class BoundedWeight(nn.Linear):
    """Its weight is a property of its class."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.raw = nn.Parameter(self._parameters.pop("weight").data)

    @property
    def weight(self):
        return torch.tanh(self.raw)

    @weight.setter
    def weight(self, value):
        self._parameters["weight"] = value


class Masked(nn.MultiheadAttention):
    def merge_masks(self, *args):
        return super().merge_masks(*args)


class Louder(nn.TransformerEncoderLayer):
    def _sa_block(self, x, *args, **kwargs):
        return 2 * super()._sa_block(x, *args, **kwargs)


def on_the_layer():
    layer = nn.Conv1d(4, 6, 3)
    plain = layer._conv_forward
    layer._conv_forward = lambda x, w, b: plain(x, w - w.mean((1, 2), keepdim=True), b)
    return layer


class SamplesSecond(nn.Module):
    """The layer has positions first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class SelfAttention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


LAYERS = {
    "normalised weight": lambda: Normalised(4, 6, 3),
    "causal convolution": lambda: Causal(4, 6, 3),
    "set on the layer": on_the_layer,
    "instance norm": lambda: nn.Sequential(nn.Conv1d(4, 4, 1), LouderInstanceNorm(4, affine=True)),
    "transposed": lambda: Shorter(4, 6, 3, stride=2),
    "weight is a property": lambda: BoundedWeight(8, 6),
    "attention": lambda: SelfAttention(Masked(8, 2, batch_first=True)),
    "transformer, samples second": lambda: SamplesSecond(Louder(8, 2, 12, dropout=0.0)),
}


def losses(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).sum(1)


def made(name):
    torch.manual_seed(0)
    return LAYERS[name]().double(), torch.randn(N, 4, 8, dtype=torch.float64)


def truth(model, x):
    return loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_what_runs(name):
    model, x = made(name)
    grads = truth(model, x)
    norms = norms_of(grads)
    for options in ({}, {"passes": 2}):
        mode = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", **options)
        model.zero_grad()
        found = losses(mode, x)
        in_two_passes(mode, found, "sum") if options else found.sum().backward()
        assert relative_error(mode.get_norm_sample().double(), norms) < 1e-6, options
        want = clipped_sum(grads, C)
        for p_name, p in model.named_parameters():
            assert relative_error(p.grad, want[p_name]) < 1e-6, (options, p_name)
        mode.to_standard_module()
    mode = GradSampleModule(model, loss_reduction="sum")
    losses(mode, x).sum().backward()
    for p_name, p in model.named_parameters():
        assert relative_error(p.grad_sample, grads[p_name]) < 1e-9, p_name


def test_in_a_graph():
    model, x = made("normalised weight")
    norms = norms_of(truth(model, x))
    step = compile_step(model, losses, max_grad_norm=C, batch_size=N, backend="eager")
    step(x)
    assert relative_error(step.norms.double(), norms) < 1e-6


@pytest.mark.parametrize("where", ["layer", "class"])
def test_a_method_set_after_the_first_step(where, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Conv1d(4, 6, 3).double(), torch.randn(N, 4, 8, dtype=torch.float64)
    plain = nn.Conv1d._conv_forward
    mode = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    losses(mode, x).sum().backward()
    model.zero_grad()
    if where == "layer":
        model._conv_forward = lambda x, w, b: plain(model, x, 10 * w, b)
    else:
        monkeypatch.setattr(nn.Conv1d, "_conv_forward", lambda self, x, w, b: plain(self, x, 10 * w, b))
    losses(mode, x).sum().backward()
    norms = mode.get_norm_sample()
    mode.to_standard_module()
    assert relative_error(norms.double(), norms_of(truth(model, x))) < 1e-6


@pytest.mark.parametrize("cls", [nn.Linear, nn.LayerNorm])
def test_a_class_whose_forward_is_replaced(cls, monkeypatch):
    torch.manual_seed(0)
    model, x = cls(8, *([6] if cls is nn.Linear else [])).double(), torch.randn(N, 4, 8, dtype=torch.float64)
    plain = cls.forward
    mode = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    losses(mode, x).sum().backward()
    model.zero_grad()
    monkeypatch.setattr(cls, "forward", lambda self, x: plain(self, x) * 10)
    losses(mode, x).sum().backward()
    norms = mode.get_norm_sample()
    mode.to_standard_module()
    assert relative_error(norms.double(), norms_of(truth(model, x))) < 1e-6


def test_what_changes_nothing_keeps_the_rule():
    class Named(nn.Conv1d):
        """Other methods, properties and attributes."""

        scale = 2.0

        def extra_repr(self):
            return "named"

        def size_of(self, x):
            return x.shape

        @property
        def device(self):
            return self.weight.device

    quiet = nn.LSTM(4, 4)
    quiet.flatten_parameters = lambda: None
    assert find_rule(Named(4, 6, 3)) is find_rule(nn.Conv1d(4, 6, 3)) is not None
    assert find_forward(quiet) is find_forward(nn.LSTM(4, 4)) is not None
    assert find_rule(nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4)) is find_rule(nn.Linear(4, 4))


def test_a_recurrent_layer_is_refused_by_name():
    class Other(nn.LSTM):
        def permute_hidden(self, hx, permutation):
            return super().permute_hidden(hx, permutation)

    layer = Other(8, 6, batch_first=True)
    mode = GradSampleModuleFastGradientClipping(layer, max_grad_norm=C, loss_reduction="sum")
    with pytest.raises(InputError, match=r"Other.*another method that the forward"):
        mode(torch.randn(N, 4, 8))[0].sum().backward()
