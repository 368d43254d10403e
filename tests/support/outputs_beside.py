"""Models that use what layers give beside their first output, and what tells whether samples that meet at it in the
backward pass alone are refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, H, T, N = 6, 8, 5, 4


def by_all(g):
    return 3.0 * g * g.norm()


def by_sample(g):
    """Of gradients with samples in dimension 0 or, of states, 1."""
    return 2.0 * g


class Recurrent(nn.Module):
    """Of sequences, or of packed ones, which end where zeros begin; classified by its last state."""

    def __init__(self, kind, hook, *, which=0, with_output=False, packed=False, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(D, H, batch_first=True, **options)
        self.head, self.hook, self.which, self.with_output = nn.Linear(H, 3), hook, which, with_output
        self.packed = packed

    def forward(self, x):
        if self.packed:
            lengths = (x != 0).any(2).sum(1)
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, states = self.rnn(x)
        state = (states if isinstance(states, tuple) else (states,))[self.which]
        if state.requires_grad:
            state.register_hook(self.hook)
        return self.head(state[-1] + (output.mean(1) if self.with_output else 0.0))


class Cell(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.cell, self.head, self.hook = nn.LSTMCell(D, H), nn.Linear(H, 3), hook

    def forward(self, x):
        h, c = self.cell(x[:, 0])
        if c.requires_grad:
            c.register_hook(self.hook)
        return self.head(h) + self.head(c)


class Attention(nn.Module):
    """Its weights are an output of the model as well."""

    def __init__(self, hook, **options):
        super().__init__()
        self.attention, self.hook, self.options = nn.MultiheadAttention(D, 2, batch_first=True), hook, options

    def forward(self, x):
        y, weights = self.attention(x, x, x, **self.options)
        if weights.requires_grad:
            weights.register_hook(self.hook)
        return torch.cat([y.flatten(1), weights.flatten(1)], 1)


class Pair(nn.Module):
    """A layer of somebody's own with two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(D, H)) for _ in range(2))

    def forward(self, x):
        return x @ self.first, torch.tanh(x @ self.second)


class OfLinear(nn.Linear):
    """A subclass whose output is a dict."""

    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "other": torch.tanh(2.0 * y)}


class TwoOutputs(nn.Module):
    def __init__(self, layer, hook):
        super().__init__()
        self.layer, self.head, self.hook = layer, nn.Linear(H, 3), hook

    def forward(self, x):
        one, other = found.values() if isinstance(found := self.layer(x), dict) else found
        if other.requires_grad:
            other.register_hook(self.hook)
        return self.head(one + other)


BESIDE = {
    **{kind: lambda hook, kind=kind: Recurrent(kind, hook) for kind in ("LSTM", "GRU", "RNN")},
    "LSTM's c": lambda hook: Recurrent("LSTM", hook, which=1),
    "both outputs": lambda hook: Recurrent("LSTM", hook, with_output=True),
    "both directions": lambda hook: Recurrent("GRU", hook, bidirectional=True, num_layers=2),
    "packed": lambda hook: Recurrent("LSTM", hook, packed=True),
    "LSTMCell": Cell,
    "attention's weights": Attention,
    "of each head": lambda hook: Attention(hook, average_attn_weights=False),
    "a pair": lambda hook: TwoOutputs(Pair(), hook),
    "a dict": lambda hook: TwoOutputs(OfLinear(D, H), hook),
}
RECORDS = ("LSTMCell", "a dict")  # whose second output is on the way from the first: a hook there scales both, alone


def losses(model, x):
    return model(x).flatten(1).square().sum(1)


def padded():
    """Sequences of 3, 5, 2 and 4."""
    return torch.randn(N, T, D) * (torch.arange(T) < torch.tensor([3, 5, 2, 4])[:, None])[..., None]


def refused(model, x=None, wrapper=dpfast.GradSampleModuleFastGradientClipping, named=r"^\w[\w.]* \("):
    wrapped = wrapper(model, loss_reduction="sum")
    with pytest.raises(
        UnsupportedModuleError, match=named + r".*meet in the backward pass.*make it look at each sample"
    ):
        losses(wrapped, torch.randn(N, T, D) if x is None else x).sum().backward()


def right(model, x=None):
    x = torch.randn(N, T, D) if x is None else x
    exact = norms_of(loop_over_samples(model, lambda m, x: losses(m, x).sum(), x))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5
