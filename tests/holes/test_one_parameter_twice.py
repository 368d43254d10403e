"""The same parameter in several places of one layer, or of one function: its gradient is the sum of all uses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from released import in_two_passes
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping, compile_step
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C, N, D = 0.1, 3, 8


class Of(nn.Module):
    """A layer as the function calls it."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


class Free(nn.Module):
    """A parameter that a function takes twice."""

    def __init__(self, function, size=D):
        super().__init__()
        self.first, self.gain, self.function = nn.Linear(D, D), nn.Parameter(torch.randn(size)), function

    def forward(self, x):
        gain = self.gain
        return self.function(self.first(x), gain)


def tied(layer, **names):
    for name, of in names.items():
        setattr(layer, name, getattr(layer, of))
    return layer


def recurrent(cls, *, names=("weight_ih", "weight_hh", "bias_ih", "bias_hh"), **options):
    """Both directions, or all layers, tied."""
    layer = cls(D, D, batch_first=True, **options)
    suffix = "_l0_reverse" if layer.bidirectional else "_l1"
    tied(layer, **{f"{name}{suffix}": f"{name}_l0" for name in names})
    return Of(layer, first)


def first(layer, x):
    return layer(x)[0]


def last(layer, x):
    output = layer(x[:, 0])
    return output[0] if isinstance(output, tuple) else output


def across(layer, x):
    return layer(x.transpose(1, 2))


def attention(**options):
    return nn.MultiheadAttention(D, 2, batch_first=True, **options)


MODELS = {
    "GRU, biases": lambda: Of(tied(nn.GRU(D, D, batch_first=True), bias_hh_l0="bias_ih_l0"), first),
    "RNN, weights": lambda: Of(tied(nn.RNN(D, D, batch_first=True), weight_hh_l0="weight_ih_l0"), first),
    "LSTM, directions": lambda: recurrent(nn.LSTM, bidirectional=True),
    "LSTM, layers": lambda: recurrent(nn.LSTM, num_layers=2),
    "attention, q and k": lambda: Of(
        tied(attention(vdim=3), q_proj_weight="k_proj_weight"), lambda layer, x: layer(x, 2 * x, x[..., :3])[0]
    ),
    "attention, keys' and values' bias": lambda: Of(
        tied(attention(add_bias_kv=True), bias_k="bias_v"), lambda layer, x: layer(x, x, x)[0]
    ),
    "group norm": lambda: Of(tied(nn.GroupNorm(2, 4), bias="weight"), nn.Module.__call__),
    "group norm by its rule": lambda: Of(tied(nn.GroupNorm(2, D), bias="weight"), across),  # not contiguous
    "F.layer_norm": lambda: Free(lambda x, p: F.layer_norm(x, (D,), p, p)),
    "F.group_norm": lambda: Free(lambda x, p: F.group_norm(x, 2, p, p), 4),
    "F.group_norm by its rule": lambda: Free(lambda x, p: F.group_norm(x.transpose(1, 2), 2, p, p)),
}
BY_FUNCTORCH = {  # and not in a graph
    "GRUCell": lambda: Of(tied(nn.GRUCell(D, D), bias_hh="bias_ih"), last),
    "LSTMCell": lambda: Of(tied(nn.LSTMCell(D, D), weight_hh="weight_ih"), last),
    "layer norm": lambda: nn.Sequential(nn.Linear(D, D), tied(nn.LayerNorm(D), bias="weight")),
    "instance norm": lambda: Of(tied(nn.InstanceNorm1d(4, affine=True), bias="weight"), nn.Module.__call__),
}
MODES = ["one pass", "one pass by functorch", "two passes", "grad_sample", "ordinary", "graph"]
CASES = [(name, mode) for name in MODELS for mode in MODES]
CASES += [(name, mode) for name in BY_FUNCTORCH for mode in MODES[:-1]]


def losses(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).sum(1)


@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}, {mode}" for name, mode in CASES])
def test_its_uses_are_added(name, mode):
    torch.manual_seed(0)
    model = {**MODELS, **BY_FUNCTORCH}[name]().double()
    x = torch.randn(N, 4, D, dtype=torch.float64)
    exact = loop_over_samples(copy.deepcopy(model), lambda model, x: losses(model, x).sum(), x)
    total, clipped = {n: g.sum(0) for n, g in exact.items()}, clipped_sum(exact, C)
    options = {"loss_reduction": "sum", "force_functorch": "functorch" in mode}
    if mode == "grad_sample":
        losses(GradSampleModule(model, **options), x).sum().backward()
        for n, p in model.named_parameters():
            assert relative_error(p.grad_sample, exact[n]) < 1e-12
            assert relative_error(p.grad, total[n]) < 1e-12
        return
    if mode == "graph":
        step = compile_step(model, losses, max_grad_norm=C, batch_size=N, backend="eager")
        step(x)
        norms = step.norms
    elif mode == "ordinary":
        wrapped = GradSampleModuleFastGradientClipping(model, **options)
        loss = losses(wrapped, x).sum()
        wrapped.disable_hooks()
        loss.backward()
        clipped, norms = total, norms_of(exact)
    else:
        passes = 2 if mode == "two passes" else 1
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=passes, **options)
        found = losses(wrapped, x)
        in_two_passes(wrapped, found, "sum") if passes == 2 else found.sum().backward()
        norms = wrapped.get_norm_sample()
    assert relative_error(norms.double(), norms_of(exact)) < 1e-6
    for n, p in model.named_parameters():
        assert relative_error(p.grad, clipped[n]) < 1e-6
