"""Biases alone (DP-BiTFiT): no input of a linear layer is kept, as in torch. (Convolutions keep theirs there too.)"""

import gc
from collections import OrderedDict

import pytest
import torch
from cases import clipped_as_told
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import dpfast
from dpfast.errors import DpfastWarning
from dpfast.taps import registry
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C, N = 0.5, 4
WATCHED: list[StorageWeakRef] = []  # inputs of the layer; not in the model, of which looks make copies
LAYERS = {  # T = N among them
    "linear": (lambda: nn.Linear(6, 8), (N, 6)),
    "linear, positions": (lambda: nn.Linear(6, 8), (N, 5, 6)),
    "linear, T = N": (lambda: nn.Linear(6, 8), (N, N, 6)),
    "transposed linear": (lambda: Conv1D(8, 6), (N, 3, 6)),  # GPT-2's
}


class Net(nn.Module):
    """A layer between others, whose input nobody else keeps, checkpointed if asked."""

    def __init__(self, layer, reentrant=None):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def inner(self, x):
        x = x * torch.ones(1)
        WATCHED.append(StorageWeakRef(x.untyped_storage()))
        return self.layer(x).tanh()

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def net(name="linear, positions", reentrant=None):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    made = Net(make(), reentrant)
    made.layer.weight.requires_grad_(False)
    return made, torch.randn(shape, requires_grad=True)


def losses(model, x):
    return model(x).square().flatten(1).sum(1)


def exactly(model, x):
    return loop_over_samples(model, lambda model, x: losses(model, x).sum(), x)


def clipping(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_right_and_inputs_are_let_go(name):
    model, x = net(name)
    exact = exactly(model, x)
    model.layer.weight.requires_grad_(True)
    both = exactly(model, x)  # of the model that is not wrapped yet
    model.layer.weight.requires_grad_(False)
    wrapped = clipping(model)
    for _ in range(3):  # recipes are learned in the first
        wrapped.zero_grad()
        WATCHED.clear()
        loss = losses(wrapped, x).mean()
        gc.collect()
        assert WATCHED and all(memory.expired() for memory in WATCHED)
        loss.backward()
        expected = clipped_as_told(wrapped.get_clipping_coef(), exact, C)
        assert relative_error(model.layer.bias.grad, expected["layer.bias"]) <= 1e-5
        assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
        assert model.layer.weight.grad is None
    wrapped.zero_grad()
    model.layer.weight.requires_grad_(True)
    loss = losses(wrapped, x).mean()
    assert not WATCHED[-1].expired()  # now it is needed
    loss.backward()
    expected = clipped_as_told(wrapped.get_clipping_coef(), both, C)
    for p, total in zip(model.parameters(), expected.values(), strict=True):
        assert relative_error(p.grad, total) <= 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_materialized_gradients_are_right(name):
    model, x = net(name)
    exact = exactly(model, x)
    wrapped = dpfast.GradSampleModule(model)
    losses(wrapped, x).mean().backward()
    assert relative_error(model.layer.bias.grad_sample, exact["layer.bias"]) <= 1e-5


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_checkpoints_and_second_passes(passes, reentrant):
    model, x = net(reentrant=reentrant)
    expected = clipped_sum(exactly(model, x), C)["layer.bias"]
    wrapped = clipping(model, passes=passes)
    of_samples = losses(wrapped, x)
    of_samples.mean().backward(retain_graph=passes == 2)
    if passes == 2:
        wrapped.disable_hooks()
        (wrapped.get_clipping_coef() * of_samples).sum().backward()
        wrapped.enable_hooks()
    assert relative_error(model.layer.bias.grad, expected) <= 1e-5


def test_input_of_the_graph_that_is_captured():
    model, x = net()
    expected = clipped_sum(exactly(model, x), C)["layer.bias"]
    model = nn.Sequential(OrderedDict(layer=model.layer, tanh=nn.Tanh()))
    step = dpfast.compile_step(model, losses, max_grad_norm=C, batch_size=N, backend="aot_eager")
    step(x.detach())
    assert relative_error(model.layer.bias.grad, expected) <= 1e-5


def test_input_may_be_written_to_as_in_torch():
    """``x += layer(x)``: with the weight frozen, torch keeps no input either."""
    layer = nn.Linear(6, 6)
    layer.weight.requires_grad_(False)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            x = x * 2.0
            x += self.layer(x)
            return x

    model, x = Residual(), torch.randn(N, 5, 6)
    expected = clipped_sum(exactly(model, x), C)["layer.bias"]
    losses(clipping(model), x).mean().backward()
    assert relative_error(layer.bias.grad, expected) <= 1e-5


def test_rule_that_reads_it_all_the_same_gets_no_number():
    """A gradient made of zeros would be too small, and clipping would bound nothing."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return x.detach().mean(-1, keepdim=True) * self.bias

    @registry.register_rule(Scaled, fresh=True, without_input=["bias"])
    def wrong(layer, activations, backprops):
        return {layer.bias: dpfast.factors.Dense((activations[0].mean(-1, keepdim=True) * backprops).sum(1))}

    try:
        model, x = Net(Scaled(6, 8)), torch.randn(N, 5, 6)
        model.layer.weight.requires_grad_(False)
        wrapped = clipping(model)
        with pytest.warns(DpfastWarning, match="4 of 4 samples"):
            losses(wrapped, x).mean().backward()
            assert wrapped.nonfinite_samples == 4  # which a GPU tells when it is asked
        assert wrapped.get_clipping_coef().eq(0.0).all()
        assert not model.layer.bias.grad.any()
    finally:
        registry.RULES.pop(Scaled)
        registry.GRAD_SAMPLERS.pop(Scaled)
        registry.NORM_SAMPLERS.pop(Scaled)


def test_sampler_of_somebody_else_has_the_input(monkeypatch):
    seen = []
    for table in (registry.RULES, registry.GRAD_SAMPLERS, registry.NORM_SAMPLERS):
        monkeypatch.setitem(table, nn.Linear, table[nn.Linear])  # as it was, afterwards

    @dpfast.register_grad_sampler(nn.Linear)
    def sampler(layer, activations, backprops):
        seen.append(activations[0])
        return {layer.bias: backprops.sum(1)}

    model, x = net()
    losses(clipping(model), x).mean().backward()
    assert torch.equal(seen[-1], x)
