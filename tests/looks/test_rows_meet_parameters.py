"""Rows that the data picks, and parameters that no module has to itself: tied by hand, or the model's own."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from in_both_modes import check
from own_backwards import BatchMean
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError

N, T, D, V = 5, 7, 4, 9

OPERATIONS = {
    "linear": lambda m, h: F.linear(h, m.table.weight),
    "linear with a bias": lambda m, h: F.linear(h, m.table.weight, m.bias),
    "matmul": lambda m, h: h @ m.table.weight.T,
    "torch.mm": lambda m, h: torch.mm(h, m.table.weight.T),
    "einsum": lambda m, h: torch.einsum("md,vd->mv", h, m.table.weight),
    "scaled first": lambda m, h: F.linear(h * m.scale, m.table.weight * 0.5),
    "a bias behind a layer": lambda m, h: m.head(h) + m.bias,
    "layer_norm": lambda m, h: m.head(F.layer_norm(h, (D,), m.scale, m.shift)),
    "where": lambda m, h: m.head(torch.where(h > 0, h, m.scale)),
    "made of others": lambda m, h: h @ (m.left @ m.left.T) @ m.table.weight.T,
    "softplus": lambda m, h: m.head(h / F.softplus(m.scale)),
    "twice": lambda m, h: torch.tanh(h * m.scale + m.shift) * m.scale,
    "three dimensions": lambda m, h: (h.unsqueeze(1) * m.left).flatten(1),
}


class Model(nn.Module):
    """Tokens that are 0 are picked."""

    def __init__(self, operation, mixes=None, frozen=False):
        super().__init__()
        self.operation, self.mixes = [operation], [mixes or (lambda x: x)]
        self.table, self.layer, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.scale, self.shift = nn.Parameter(1.0 + torch.rand(D)), nn.Parameter(torch.randn(D))
        self.bias = nn.Parameter(torch.randn(V))
        self.left = nn.Parameter(torch.randn(D, D))
        self.register_buffer("phases", torch.arange(float(D)))
        if frozen:
            self.layer.requires_grad_(False)

    def hidden(self, tokens):
        x = torch.sin(0.7 * tokens.unsqueeze(-1) + self.phases)
        return torch.tanh(self.layer(x)) + 0.1 * x.cumsum(1)

    def forward(self, tokens):
        rows = self.mixes[0](self.hidden(tokens)[tokens == 0])
        return torch.tanh(self.operation[0](self, rows))


def tokens_of(seed, zeros=None):
    """zeros: how many each sample has; None: as it comes."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, V, (N, T), generator=random)
    for i in range(N):
        k = int(torch.randint(0, 4, (1,), generator=random)) if zeros is None else zeros[i]
        tokens[i, torch.randperm(T, generator=random)[:k]] = 0
    return tokens


UNEVEN = [tokens_of(0), tokens_of(1), tokens_of(2, [3, 0, 1, 1, 0]), tokens_of(3, [0] * N), tokens_of(4)]
EVEN = [*(tokens_of(i, [1] * N) for i in range(3)), tokens_of(3, [3, 0, 1, 1, 0]), tokens_of(4, [0, 5, 0, 0, 0])]
TWICE = [*(tokens_of(i, [2] * N) for i in range(3)), tokens_of(3, [4, 0, 2, 2, 2]), tokens_of(4, [0, 7, 0, 2, 1])]


@pytest.mark.parametrize(("batches", "frozen"), [(UNEVEN, False), (UNEVEN, True), (EVEN, False), (TWICE, True)])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_each_sample_has_its_own_gradient(operation, batches, frozen):
    """Where as many rows are picked as there are samples, too, none of them a row of each."""
    torch.manual_seed(0)
    check(Model(operation, frozen=frozen), *batches)


MIXES = {
    "their mean": lambda x: x - 0.5 * x.mean(0),
    "their sum": lambda x: x + 0.1 * x.sum(0, keepdim=True),
    "the softmax over them": lambda x: x.softmax(0) * len(x),
    "a product": lambda x: x + 0.1 * (x @ x.T).softmax(-1) @ x,
    "the mean, in the backward pass": BatchMean.apply,
}

# A gradient that goes on to nothing that is trained is nobody's.
MIXED = {f"{name}, {frozen}": (MIXES[name], frozen) for name in MIXES for frozen in (False, True)}
del MIXED["the mean, in the backward pass, True"]


@pytest.mark.parametrize("batches", [UNEVEN, EVEN], ids=["uneven", "one each"])
@pytest.mark.parametrize(("mixes", "frozen"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("name", ["linear", "layer_norm", "twice"])
def test_rows_that_meet_are_refused(name, mixes, batches, frozen):
    torch.manual_seed(0)
    wrapped = GradSampleModuleFastGradientClipping(Model(OPERATIONS[name], mixes, frozen), loss_reduction="sum")
    with pytest.raises(DpfastError):
        for tokens in batches[:2]:
            wrapped(tokens).square().sum().backward()


@pytest.mark.parametrize("mixes", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("name", ["linear", "twice"])
def test_rows_that_meet_behind_it_are_refused(name, mixes):
    torch.manual_seed(0)
    model = Model(lambda m, h: mixes(OPERATIONS[name](m, h)), frozen=True)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(DpfastError):
        for tokens in UNEVEN[:2]:
            wrapped(tokens).square().sum().backward()


NOT_FOLLOWED = {
    "views": lambda m, h: (h.view(-1, 2, 2) * m.left.view(-1, 2, 2)[0]).view(-1, D),
    "cumsum": lambda m, h: F.linear(h.cumsum(1), m.table.weight),
    "a transpose": lambda m, h: (m.table.weight @ h.T).T,
    "another order of letters": lambda m, h: torch.einsum("vd,md->vm", m.table.weight, h).T,
    "sorted entries": lambda m, h: h.sort(-1)[0] * m.scale,
}


@pytest.mark.parametrize("batches", [UNEVEN, EVEN], ids=["uneven", "one each"])
@pytest.mark.parametrize("operation", NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
def test_rows_that_are_not_followed_are_refused_or_right(operation, batches):
    torch.manual_seed(0)
    model = Model(operation)
    with contextlib.suppress(DpfastError):
        check(model, *batches)


class Adapter(nn.Module):
    """Special tokens get a product of their own, within a block; rows are put back where they stood."""

    def __init__(self, mixes=None):
        super().__init__()
        self.w, self.mixes = nn.Parameter(torch.randn(D, D)), [mixes or (lambda x: x)]

    def forward(self, x, tokens):
        mask = tokens == 0
        y = x.clone()
        y[mask] = torch.tanh(self.mixes[0](x[mask]) @ self.w)
        return y


class Adapted(nn.Module):
    def __init__(self, mixes=None, frozen=False):
        super().__init__()
        self.model, self.adapter, self.head = Model(None), Adapter(mixes), nn.Linear(D, V)
        self.model.requires_grad_(not frozen)

    def forward(self, tokens):
        return self.head(self.adapter(self.model.hidden(tokens), tokens))


@pytest.mark.parametrize("batches", [UNEVEN, EVEN, TWICE], ids=["uneven", "one each", "two each"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_block_s_own_parameter(batches, frozen):
    torch.manual_seed(0)
    check(Adapted(frozen=frozen), *batches)


@pytest.mark.parametrize(("mixes", "frozen"), MIXED.values(), ids=MIXED)
def test_a_block_s_own_parameter_that_rows_meet_at_is_refused(mixes, frozen):
    torch.manual_seed(0)
    wrapped = GradSampleModuleFastGradientClipping(Adapted(mixes, frozen), loss_reduction="sum")
    with pytest.raises(DpfastError):
        for tokens in UNEVEN[:2]:
            wrapped(tokens).square().sum().backward()
