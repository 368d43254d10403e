"""Experts that get whole samples, or one row of each, as the data says: how many there are changes with any of them."""

import pytest
import torch
from own_backwards import BatchMean
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

N, D, T = 5, 4, 6


class Meets(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes

    def forward(self, x):
        return self.mixes(x)


class Expert(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.inner, self.last = self.first(), nn.Sequential(nn.Linear(D, D), Meets(mixes))

    def first(self):
        return nn.Linear(D, D)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(x)))


class Convolves(Expert):
    def first(self):
        return nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(x.transpose(1, 2))).transpose(1, 2))


class Remembers(Expert):
    def first(self):
        return nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.last(self.inner(x)[0])


class Attends(Expert):
    def first(self):
        return nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        return self.last(self.inner(x, x, x)[0])


class Divides(Expert):
    """What it makes of zeros is no number."""

    def forward(self, x):
        return super().forward(x / x.norm(dim=-1, keepdim=True))


class WithLoss(Expert):
    """Of a router's, say, beside the rows."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.detach().square().mean(), None


class Pools(Expert):
    def forward(self, x):
        return super().forward(x).mean(1, keepdim=True).expand_as(x)


PICKS = {
    "mask": lambda h, chosen: (h[chosen], chosen.nonzero().squeeze(1)),
    "numbers": lambda h, chosen: (h[rows := chosen.nonzero(as_tuple=True)[0]], rows),
    "list": lambda h, chosen: (h[rows := [i for i, x in enumerate(chosen.tolist()) if x]], torch.tensor(rows).long()),
}


class Mixture(nn.Module):
    """The best of its experts for each sample, or the best two."""

    def __init__(
        self, expert=Expert, mixes=lambda x: x, *, pick="numbers", experts=3, best=1, trained=True, rows=False
    ):
        super().__init__()
        self.pick, self.best, self.rows = pick, best, rows
        self.table = nn.Linear(D, D).requires_grad_(trained)
        self.gate = nn.Linear(D, experts)
        self.experts = nn.ModuleList(expert(mixes) for _ in range(experts))
        self.head = nn.Linear(D, 2)

    def forward(self, x):
        h = torch.tanh(self.table(x[:, 0] if self.rows else x))
        weights = (8.0 * self.gate(h if self.rows else h.mean(1))).softmax(-1)
        best, out = weights.topk(self.best)[1], torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            some, rows = PICKS[self.pick](h, (best == i).any(-1))
            if len(rows):
                y = expert(some)
                y = y[0] if isinstance(y, tuple) else y
                out = out.index_add(0, rows, y * weights[rows, i].view(-1, *[1] * (h.dim() - 1)))
        out = self.head(h + out)
        return out if self.rows else out.sum(1)


def loss(model, x):
    return model(x).square().sum()


def of(*args, n=N, seed=4, **kwargs):
    """Which expert a look's samples get is luck: with seed 4 all three the same, and others once one is exchanged."""
    torch.manual_seed(seed)
    return Mixture(*args, **kwargs), 3.0 * torch.randn(n, T, D)


KINDS = [Expert, Convolves, Remembers, Attends, Divides, WithLoss, Pools]
SHAPES = [{"experts": 3}, {"experts": 4, "n": 6}, {"experts": 3, "best": 2}, {"experts": 2, "n": 2}]
FLAT = [
    {"rows": True},
    {"rows": True, "experts": 4, "n": 6},
    {"rows": True, "best": 2},
    {"rows": True, "best": 2, "n": 2},
]


@pytest.mark.parametrize(
    "args",
    [
        *({"expert": expert, "pick": pick} for expert in KINDS for pick in PICKS),
        *({**shape, "seed": seed} for shape in (*SHAPES, *FLAT) for seed in (5, 9, 13)),
    ],
    ids=str,
)
def test_samples_that_are_picked_whole(args):
    model, x = of(**args)
    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=0.1)
    loss(wrapped, x).backward()
    norms = torch.stack([g.flatten(1).square().sum(1) for g in exact.values()]).sum(0).sqrt()
    assert relative_error(wrapped.get_norm_sample(), norms) <= 1e-5
    factors = (0.1 / norms).clamp(max=1.0)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad, torch.einsum("n,n...->...", factors, exact[name])) <= 1e-5


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("mixes", [BatchMean.apply, lambda x: x - x.mean(0)], ids=["backward", "both"])
@pytest.mark.parametrize("args", [{"expert": expert} for expert in KINDS] + SHAPES[:3] + FLAT[:3], ids=str)
def test_samples_that_meet_in_an_expert(args, mixes, trained):
    model, x = of(**{"expert": Expert, **args}, mixes=mixes, trained=trained)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, x).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_hook_that_adds_up_all_samples_gradients():
    def adds(x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad + grad.sum(0))
        return x

    model, x = of(mixes=adds)
    with pytest.raises(UnsupportedModuleError, match="samples meet in the backward pass"):
        loss(GradSampleModuleFastGradientClipping(model, loss_reduction="sum"), x).backward()
