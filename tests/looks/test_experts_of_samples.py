"""Experts that get whole samples, or one row of each, as the data says: how many there are changes with any of them."""

import pytest
import torch
from own_backwards import BatchMean, Meets
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

N, D, T = 5, 4, 6


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


class Recurrent(nn.GRU):
    """An expert by itself, which gives its states too; what mixes stands behind it."""

    def __init__(self, mixes):
        super().__init__(D, D, batch_first=True)
        self.mixes = [mixes]

    def __call__(self, x):
        y, state = super().__call__(x)
        return self.mixes[0](y), state


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


KINDS = [Expert, Convolves, Remembers, Recurrent, Attends, Divides, WithLoss, Pools]
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
        *({"expert": expert} for expert in KINDS),
        *({"pick": pick} for pick in PICKS),
        *({**shape, "seed": seed} for shape in (*SHAPES, *FLAT) for seed in (5, 9, 13)),
    ],
    ids=str,
)
def test_samples_that_are_picked_whole(args):
    model, x = of(**args)
    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=0.1)
    loss(wrapped, x).backward()
    norms = norms_of(exact)
    assert relative_error(wrapped.get_norm_sample(), norms) <= 1e-5
    factors = (0.1 / norms).clamp(max=1.0)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad, torch.einsum("n,n...->...", factors, exact[name])) <= 1e-5


@pytest.mark.parametrize("mixes", [BatchMean.apply, lambda x: x - x.mean(0)], ids=["backward", "both"])
@pytest.mark.parametrize(
    "args", [{"trained": False}, *({"expert": expert} for expert in KINDS), *SHAPES[:3], *FLAT[:3]], ids=str
)
def test_samples_that_meet_in_an_expert(args, mixes):
    model, x = of(**{"expert": Expert, **args}, mixes=mixes)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, x).backward()
    assert all(p.grad is None for p in model.parameters())


class OfTokens(nn.Module):
    """Experts get whole samples of tokens, each with a table of its own."""

    def __init__(self, mixes=lambda x: x, *, tables=False):
        super().__init__()
        self.table, self.gate, self.head = nn.Embedding(9, D), nn.Linear(D, 3), nn.Linear(D, 2)
        inner = [] if tables else [nn.Tanh(), nn.Linear(D, D), Meets(mixes)]
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Embedding(9, D), *inner) if inner else nn.Embedding(9, D) for _ in range(3)
        )
        self.behind = Meets(mixes if tables else lambda x: x)

    def forward(self, x):
        h = self.table(x)
        best, out = (8.0 * self.gate(h.mean(1))).argmax(1), torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, self.behind(expert(x[rows])))
        return self.head((h + out).tanh().sum(1))


@pytest.mark.parametrize("tables", [True, False], ids=["tables", "with tables"])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_that_are_picked(seed, tables):
    torch.manual_seed(seed)
    x = torch.randint(9, (N, T))
    model = OfTokens(tables=tables)
    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    torch.manual_seed(seed)
    mixes = GradSampleModuleFastGradientClipping(OfTokens(BatchMean.apply, tables=tables), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError):
        loss(mixes, x).backward()


class Sorted(nn.Module):
    """All samples, in another order, with positions (1, T) that they share."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(9, D), WithPositions(), nn.Linear(D, 2)

    def forward(self, x):
        order = x.sum(1).argsort()
        return self.head(self.inner(self.table(x)[order])[order.argsort()].sum(1))


class WithPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.lin = nn.Embedding(T, D), nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.lin(x + self.positions(torch.arange(x.shape[1])[None])))


def test_positions_of_samples_in_another_order():
    torch.manual_seed(0)
    model, x = Sorted(), torch.randint(9, (N, T))
    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


class Images(nn.Module):
    """Of which each expert convolves those that the data sends it."""

    def __init__(self, mixes=lambda x: x):
        super().__init__()
        self.stem, self.gate, self.head = nn.Conv2d(3, D, 3, padding=1), nn.Linear(D, 3), nn.Linear(D, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(D, D, 3, padding=1), nn.GroupNorm(2, D), Meets(mixes), nn.ReLU(), nn.Conv2d(D, D, 1)
            )
            for _ in range(3)
        )

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        best, out = (8.0 * self.gate(h.mean((2, 3)))).argmax(1), torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]))
        return self.head((h + out).mean((2, 3)))


@pytest.mark.parametrize("mixes", [None, BatchMean.apply, lambda x: x - x.mean(0)], ids=["right", "backward", "both"])
def test_images_that_are_picked(mixes):
    torch.manual_seed(0)
    model, x = Images(*([mixes] if mixes else [])), torch.randn(N, 3, 5, 6)
    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    if mixes is not None:
        with pytest.raises(UnsupportedModuleError):
            loss(wrapped, x).backward()
        return
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_a_hook_that_adds_up_all_samples_gradients():
    def adds(x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad + grad.sum(0))
        return x

    model, x = of(mixes=adds)
    with pytest.raises(UnsupportedModuleError, match="samples meet in the backward pass"):
        loss(GradSampleModuleFastGradientClipping(model, loss_reduction="sum"), x).backward()
