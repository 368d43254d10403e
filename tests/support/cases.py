"""Models and batches that several tests share."""

import os

import torch
import torch.nn.functional as F
from torch import nn

from dpfast.testing import norms_of, relative_error


class Transformer(nn.Module):
    """Token and position embeddings, one attention block, an in-place activation, a free parameter, a head."""

    def __init__(self, vocabulary=40, d=16, t=9, classes=5):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d, padding_idx=0)
        self.positions = nn.Embedding(t, d)
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.up = nn.Linear(d, 2 * d)
        self.activation = nn.PReLU()
        self.down = nn.Linear(2 * d, d, bias=False)
        self.head = nn.Linear(d, classes)

    def forward(self, tokens):
        n, t = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(t, device=tokens.device).expand(n, t))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        hidden = self.activation(torch.relu_(self.up(x)) - 0.1)
        return self.head((x + self.down(input=hidden)).mean(1))


class Mlp(nn.Sequential):
    def __init__(self, d=12, classes=5):
        super().__init__(nn.Linear(d, 20), nn.ReLU(inplace=True), nn.LayerNorm(20), nn.Linear(20, classes))


class Tied(nn.Module):
    """One table for the input and the output, as in GPT-2."""

    def __init__(self, vocabulary=30, d=8):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.hidden = nn.Linear(d, d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.tokens(tokens)))).mean(1)


class Recurrent(nn.Module):
    """One Linear, used once a position."""

    def __init__(self, d=6, classes=5):
        super().__init__()
        self.cell = nn.Linear(2 * d, d)
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(self.cell(torch.cat([state, x[:, t]], dim=-1)))
        return self.head(state)


class SharedWeight(nn.Module):
    """Two Linears with one weight."""

    def __init__(self, d=7, classes=5):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, classes)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def tokens(n, t, vocabulary):
    """Token batches with repeats and padding (0)."""
    return torch.randint(0, vocabulary, (n, t)) * (torch.rand(n, t) > 0.2)


MODELS = {
    "transformer": (Transformer, lambda n: tokens(n, 9, 40)),
    "mlp": (Mlp, lambda n: torch.randn(n, 12)),
    "tied": (Tied, lambda n: tokens(n, 9, 30)),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 4, 6)),
    "shared_weight": (SharedWeight, lambda n: torch.randn(n, 7)),
}


def example(name, n=6):
    """(model, inputs, targets)"""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    return build(), batch(n), torch.randint(0, 5, (n,))


def mean_loss(model, x, y):
    return F.cross_entropy(model(x), y)


def sum_loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def joined_error(actual, exact):
    """Of all parameters together."""
    return relative_error(*(torch.cat([g[name].double().flatten() for name in exact]) for g in (actual, exact)))


def assert_gradients(actual, exact, tolerance=1e-5):
    """All parameters together within ``tolerance``, and none far off by itself (a single entry may cancel)."""
    assert set(actual) == set(exact)
    error = joined_error(actual, exact)
    assert error <= tolerance, error
    for name in exact:
        assert actual[name].shape == exact[name].shape, name
        assert relative_error(actual[name], exact[name]) <= 10 * tolerance, name


def takes_kernels(x):
    """Whether kernels take what stands where this does."""
    return x.is_cuda or os.environ.get("DPFAST_BACKEND") == "triton"


def clipped_as_told(factors, exact, c, rounding=1e-7):
    """The clipped sum by the factors that the module tells: at most C / norm, less by what its bounds add, which by
    kernels is more than by the reference (docs/bounds.md). ``rounding``: what the layers' own may change."""
    norms, factors = norms_of(exact), factors.double()
    assert (factors * norms <= c * (1 + rounding)).all()
    assert relative_error(factors, torch.where(norms > c, c / norms, 1.0)) <= (1e-4 if takes_kernels(factors) else 1e-5)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in exact.items()}


def hostile(n, t, width, magnitude, dtype, seed):
    """Tokens in pairs ±x that differ in the last bits: nearly all of the sum cancels."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(n, -(-t // 2), width, generator=generator)
    twin = -half * (1.0 + 2.0**-20 * torch.randn(half.shape, generator=generator))
    x = torch.cat([half, twin], dim=1)[:, torch.randperm(2 * half.shape[1], generator=generator)][:, :t]
    return (x * magnitude).to(dtype)


def exact_norms(a, b):
    """fp64 of fp64 products of at most 24 bits each; the remaining error is far below the bounds' margin."""
    return torch.einsum("ntp,ntd->npd", b.double(), a.double()).flatten(1).norm(dim=1)
