"""Small models with their losses and batches, and one private step against a loop over samples."""

import torch
import torch.nn.functional as F
from torch import nn

from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


class Transformer(nn.Module):
    """One block: lookup, positions, attention, norms, a head that is tied to the table."""

    def __init__(self, t=5, d=8, vocab=13):
        super().__init__()
        self.table, self.positions = nn.Embedding(vocab, d), nn.Embedding(t, d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("order", torch.arange(t))

    def forward(self, tokens):
        x = self.table(tokens) + self.positions(self.order)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x))))


def square_losses(model, x, y):
    return (model(x) - y).square().mean(1)


def token_losses(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def mlp_batch(n):
    return torch.randn(n, 6), torch.randn(n, 3)


def token_batch(n):
    return torch.randint(13, (n, 5)), torch.randint(13, (n, 5))


CASES = {"mlp": (Mlp, square_losses, mlp_batch), "transformer": (Transformer, token_losses, token_batch)}


def exact_step(net, losses, batch, limit):
    """(p.grad by name, norms) of a loop over samples in fp64."""
    exact = loop_over_samples(net, lambda model, *batch: losses(model, *batch).sum(), *batch)
    return clipped_sum(exact, limit), norms_of(exact)


def median_norm(net, losses, batch):
    return float(exact_step(net, losses, batch, 1.0)[1].median())


def check(step, net, losses, batch, **kwargs):
    """p.grad, norms, factors and counts of one step against the loop."""
    valid = kwargs.get("valid", torch.ones(len(batch[0]), dtype=torch.bool))
    exact = loop_over_samples(net, lambda model, *batch: losses(model, *batch).sum(), *[x[valid] for x in batch])
    norms = norms_of(exact)
    net.zero_grad()
    step(*batch, **kwargs)
    factors = step.clip_factors.double()
    assert step.norms.shape == factors.shape == norms.shape and step.dropped == 0
    assert relative_error(step.norms, norms) < 1e-6
    ideal = (step.max_grad_norm / norms).clamp(max=1.0)
    assert (factors <= ideal * (1.0 + 1e-5)).all() and (factors >= ideal * (1.0 - 1e-3)).all()
    for name, p in net.named_parameters():
        if not p.requires_grad:
            assert p.grad is None
        elif len(norms):
            assert relative_error(p.grad, torch.einsum("n,n...->...", factors, exact[name])) < 1e-5, name
        else:
            assert not p.grad.any(), name
