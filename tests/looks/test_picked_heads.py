"""Heads on rows that the data picks, behind which samples meet."""

import copy
import warnings

import pytest
import torch
from own_backwards import BatchMean, Meets
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

N, D, T = 6, 6, 5
CLASSES = 3  # as many as samples in most looks: no dimension of theirs

PICKS = {
    "mask": lambda h, mask: h[mask],
    "numbers": lambda h, mask: h[mask.nonzero(as_tuple=True)],
    "of all in one": lambda h, mask: h.reshape(-1, D).index_select(0, mask.flatten().nonzero().squeeze(1)),
}


class Heads(nn.Module):
    """On a table's rows, where tokens are marked. What it gives is by rows, or by samples."""

    def __init__(self, pick="mask", between=None, behind=None, *, frozen=True, by_samples=False):
        super().__init__()
        self.table, self.pick, self.by_samples = nn.Embedding(20, D).requires_grad_(not frozen), pick, by_samples
        self.head = nn.Sequential(
            nn.Linear(D, D), between or nn.Identity(), nn.GroupNorm(2, D), nn.Tanh(), nn.Linear(D, CLASSES)
        )
        self.behind = behind or nn.Identity()

    def forward(self, tokens):
        mask = tokens < 3
        rows = self.behind(self.of_rows(PICKS[self.pick](self.table(tokens), mask)))
        whose = mask.nonzero(as_tuple=True)[0]
        return rows.new_zeros(len(tokens), CLASSES).index_add(0, whose, rows) if self.by_samples else rows

    def of_rows(self, rows):
        return self.head(rows)


class Checkpointed(Heads):
    def of_rows(self, rows):
        return checkpoint(self.head, rows, use_reentrant=False)


def mean_taken_off(x):
    return x - x.mean(0)


def adds_all(x):
    if x.requires_grad:
        x.register_hook(lambda g: g + g.sum(0))
    return x


MIXES = {"in the backward pass": BatchMean.apply, "in both": mean_taken_off}


def tokens_with(marked):
    """So many are marked in each sample; None: another number in each."""
    torch.manual_seed(0)
    tokens = torch.randint(3, 20, (N, T))
    for i, row in enumerate(tokens):
        k = marked or 1 + i % 3
        row[torch.randperm(T)[:k]] = torch.randint(3, (k,))
    return tokens


def loss(model, tokens):
    return torch.sin(3.0 * model(tokens)).sum()


def check_is_right(model, tokens):
    exact = loop_over_samples(copy.deepcopy(model), loss, tokens)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(wrapped, tokens).backward()
    for name, p in wrapped._module.named_parameters():
        assert not p.requires_grad or relative_error(p.grad_sample, exact[name]) <= 1e-5, name


def check_is_refused(model, tokens):
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.1, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, tokens).backward()


@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("marked", [1, 2, None])
@pytest.mark.parametrize("pick", PICKS)
def test_heads_are_right(pick, marked, frozen, by_samples):
    check_is_right(Heads(pick, frozen=frozen, by_samples=by_samples), tokens_with(marked))


@pytest.mark.parametrize("where", ["between", "behind"])
@pytest.mark.parametrize("how", MIXES)
@pytest.mark.parametrize("marked", [1, 2, None])
@pytest.mark.parametrize("pick", PICKS)
def test_samples_that_meet_behind_picked_rows_are_refused(pick, marked, how, where):
    """No gradient was caught there: in the backward pass they met without a word."""
    model = Heads(pick, **{where: Meets(MIXES[how])}, by_samples=marked is None)
    check_is_refused(model, tokens_with(marked))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", MIXES)
@pytest.mark.parametrize("marked", [2, None])
def test_of_what_is_given_by_rows_alone(marked, how, frozen):
    """Of such an output the sum of its entries was asked for, whose gradients are all alike."""
    check_is_refused(Heads(behind=Meets(MIXES[how]), frozen=frozen), tokens_with(marked))


def test_where_each_has_the_others_rows_as_well():
    """A hook on the rows' tensor, which adds what all have."""
    for where in ("between", "behind"):
        check_is_refused(Heads(**{where: Meets(adds_all)}, by_samples=True), tokens_with(None))


def test_in_a_checkpoint():
    """What ran again had nobody to follow rows, and the look said that it fails."""
    tokens = tokens_with(None)
    check_is_right(Checkpointed(), tokens)
    for how in MIXES.values():
        check_is_refused(Checkpointed(behind=Meets(how), by_samples=True), tokens)
        check_is_refused(Checkpointed(between=Meets(how), by_samples=True), tokens)


class Weighted(nn.Module):
    """An expert that is called with more than its rows."""

    def __init__(self, meets):
        super().__init__()
        self.lin, self.last, self.meets = nn.Linear(D, D), nn.Linear(D, D), meets

    def forward(self, rows, weights):
        return self.meets(self.last(torch.tanh(self.lin(rows))) * weights[:, None])


class Experts(nn.Module):
    """One for each token."""

    def __init__(self, meets):
        super().__init__()
        self.table, self.gate, self.head = nn.Embedding(20, D), nn.Linear(D, 2), nn.Linear(D, CLASSES)
        self.experts = nn.ModuleList(Weighted(meets) for _ in range(2))

    def forward(self, tokens):
        rows = torch.tanh(self.table(tokens)).flatten(0, 1)
        weights, found = self.gate(rows).softmax(1), torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mine = (weights.argmax(1) == i).nonzero(as_tuple=True)[0]
            found = found.index_add(0, mine, expert(rows[mine], weights[mine, i])) if len(mine) else found
        return self.head((rows + found).view(*tokens.shape, D).sum(1))


def test_experts_that_are_called_with_more_than_rows():
    """How many rows they had was another number in each run, and no look went on to backward passes."""
    tokens = tokens_with(None)
    check_is_right(Experts(nn.Identity()), tokens)
    check_is_refused(Experts(adds_all), tokens)


class Edges(nn.Module):
    """Messages of rows that are picked more often than there are rows, between the positions of each sample."""

    def __init__(self, meets):
        super().__init__()
        self.table, self.message, self.head = nn.Embedding(20, D), nn.Linear(D, D), nn.Linear(D, CLASSES)
        self.table.requires_grad_(False)
        self.meets = meets

    def forward(self, tokens):
        h = self.table(tokens)
        sample, to, of = (tokens[:, :, None] + tokens[:, None] > 12).nonzero(as_tuple=True)
        messages = torch.tanh(self.meets(self.message(h[sample, of])))
        got = torch.zeros_like(h).index_put((sample, to), messages, accumulate=True)
        return self.head((h + got).sum(1))


class Scores(nn.Module):
    """One number for each sample that is picked."""

    def __init__(self, meets):
        super().__init__()
        self.weight, self.meets = nn.Parameter(torch.randn(T * D)), meets

    def forward(self, x):
        return self.meets(x.flatten(1) @ self.weight)


class OfSome(nn.Module):
    def __init__(self, meets):
        super().__init__()
        self.table, self.score = nn.Embedding(20, D).requires_grad_(False), Scores(meets)

    def forward(self, tokens):
        h = self.table(tokens)
        mine = (tokens.sum(1) > 30).nonzero(as_tuple=True)[0]
        return h.new_zeros(len(h), 1).index_put((mine,), self.score(h[mine]).unsqueeze(1))


class Widths(nn.Module):
    """A layer runs twice on what is picked, with rows of two widths."""

    def __init__(self, meets):
        super().__init__()
        self.table, self.lin, self.head = nn.Embedding(20, D), nn.Linear(D, D), nn.Linear(D, CLASSES)
        self.meets = meets

    def forward(self, tokens):
        h = self.table(tokens)
        mine = (tokens.sum(1) > 30).nonzero(as_tuple=True)[0]
        rows = self.meets(self.lin(h[mine])).sum(1) + self.lin(h[mine][:, :2]).sum(1)
        return self.head(h.sum(1).index_add(0, mine, torch.tanh(rows)))


@pytest.mark.parametrize("make", [Edges, OfSome, Widths])
def test_other_picks(make):
    torch.manual_seed(1)
    tokens = torch.randint(3, 20, (8, T))
    check_is_right(make(nn.Identity()), tokens)
    check_is_refused(make(adds_all), tokens)
