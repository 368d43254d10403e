"""Experts that nobody came to while the model was looked at, and what an expert makes of the rows that it gets."""

import copy

import pytest
import torch
from own_backwards import BatchMean, Meets
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError, DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples

N, T, D, C = 12, 4, 3, 0.2

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


class Expert(nn.Module):
    def __init__(self, mixes=lambda x: x):
        super().__init__()
        self.inner, self.last = nn.Linear(D, D), Meets(mixes)

    def made(self, x):
        return self.inner(x)

    def forward(self, x, *_):
        return self.last(torch.tanh(self.made(x)))


class Branches(Expert):
    """With a layer that does not run before it is told to."""

    late = False

    def __init__(self, mixes=lambda x: x):
        super().__init__(lambda x: x)
        self.branch, self.meets = nn.Linear(D, D), Meets(mixes)

    def made(self, x):
        return self.inner(x) + (self.meets(torch.tanh(self.branch(x))) if self.late else 0.0)


class Folds(Expert):
    def made(self, x):
        return self.inner(x.flatten(0, 1)).view(x.shape)


class FoldsTimeFirst(Expert):
    def made(self, x):
        return self.inner(x.transpose(0, 1).reshape(-1, D)).view(T, -1, D).transpose(0, 1)


class FoldsPermuted(Expert):
    def made(self, x):
        return self.inner(x.permute(1, 0, 2).reshape(-1, D)).view(T, -1, D).permute(1, 0, 2)


class TwoViews(Expert):
    def made(self, x):
        one, two = self.inner(torch.cat([x[:, 0], x[:, 1]])).chunk(2)
        return x + (one * two).unsqueeze(1)


class TimeFirst(Expert):
    def made(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class First(Expert):
    def made(self, x):
        return x + self.inner(x[:, 0]).unsqueeze(1)


class OfContext(Expert):
    """Of all samples' contexts, those of its own."""

    def forward(self, x, context, rows):
        return x + self.inner(torch.tanh(context))[rows].view(len(x), *[1] * (x.dim() - 2), D)


class Mixture(nn.Module):
    """A sample, or a token, goes where its last number says."""

    def __init__(self, *experts, trained=True, tokens=False):
        super().__init__()
        self.table, self.head, self.tokens = nn.Linear(D, D).requires_grad_(trained), nn.Linear(D, 2), tokens
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        h, number = torch.tanh(self.table(x[..., :D])), x[..., D]
        context, out = 0.5 * h.mean(1), torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = ((number if self.tokens else number[:, 0]) == i).nonzero(as_tuple=True)
            if len(rows[0]):
                out = out.index_put(rows, expert(h[rows], context, rows[0]))
        return self.head(h + out).sum(1)


def batch(seed, second, n=N, tokens=False):
    """``second``: the samples, or tokens as they are counted, that the second expert gets."""
    x = torch.randn(n, T, D + 1, generator=torch.Generator().manual_seed(seed))
    x[..., D] = 0.0
    if tokens:
        x[..., D].view(-1)[second] = 1.0
    else:
        x[second, :, D] = 1.0
    return x


def loss(model, x):
    return model(x).square().sum()


def check(wrapped, x):
    """A step, whose gradients are those of a loop over samples."""
    model = wrapped._module
    total = clipped_sum(loop_over_samples(copy.deepcopy(wrapped).to_standard_module(), loss, x), C)
    wrapped.zero_grad()
    loss(wrapped, x).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert (p.grad - total[name]).norm() <= 1e-4 * C, name


def wrap(*experts, **kwargs):
    torch.manual_seed(0)
    model = Mixture(*experts, **kwargs)
    return GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C)


LATE = {"one of the first": [1], "far behind": [10], "several": [2, 9, 11]}
MIXES = {"both": lambda x: x - x.mean(0), "backward": BatchMean.apply, "norm": lambda x: x / x.norm()}


def nobody_so_far(wrapped, forwards, tokens=False):
    for seed in range(forwards):
        check(wrapped, batch(seed, [], tokens=tokens))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("second", LATE.values(), ids=LATE)
@pytest.mark.parametrize("forwards", [1, 2])
def test_an_expert_that_runs_late(forwards, second, tokens):
    wrapped = wrap(Expert(), Expert(), tokens=tokens)
    nobody_so_far(wrapped, forwards, tokens)
    for seed in range(2):
        check(wrapped, batch(10 + seed, second, tokens=tokens))


@pytest.mark.parametrize(("trained", "second"), [(True, [1, 2]), (True, [10, 11]), (False, [10, 11])], ids=str)
@pytest.mark.parametrize("mixes", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize(("tokens", "forwards"), [(False, 2), (False, 3), (True, 2)])
def test_one_in_which_samples_meet_is_refused_when_it_runs(tokens, forwards, mixes, trained, second):
    wrapped = wrap(Expert(), Expert(mixes), trained=trained, tokens=tokens)
    nobody_so_far(wrapped, forwards, tokens)
    second = [T * i for i in second] if tokens else second
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, batch(10, second, tokens=tokens)).backward()


@pytest.mark.parametrize("mixes", [None, *MIXES.values()], ids=["apart", *MIXES])
def test_a_branch_of_an_expert_that_runs_late(mixes):
    late = Branches(mixes or (lambda x: x))
    wrapped = wrap(Expert(), late)
    for seed in range(3):
        check(wrapped, batch(seed, [1, 5, 6]))
    late.late = True
    if mixes is None:
        check(wrapped, batch(3, [1, 5, 6]))
        return
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, batch(3, [1, 5, 6])).backward()


@pytest.mark.parametrize("expert", [Folds, FoldsTimeFirst, FoldsPermuted, TwoViews, TimeFirst, First])
@pytest.mark.parametrize("forwards", [0, 2])
@pytest.mark.parametrize("trained", [True, False])
def test_rows_of_several_dimensions(trained, forwards, expert):
    """In whatever order, with as many samples picked as there are positions too: right, or refused."""
    wrapped = wrap(Expert(), expert(), trained=trained)
    nobody_so_far(wrapped, forwards)
    try:
        for seed, second in enumerate(([1, 3, 4, 9], [2, 3], [0, 5, 10, 11], [7])):
            check(wrapped, batch(20 + seed, second))
    except DpfastError:
        assert expert is not Folds


@pytest.mark.parametrize("mixes", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("expert", [Folds, FoldsTimeFirst, TwoViews, TimeFirst, First])
@pytest.mark.parametrize(("trained", "forwards"), [(True, 0), (False, 0), (False, 2)])
def test_samples_that_meet_behind_them(trained, forwards, expert, mixes):
    wrapped = wrap(Expert(), expert(mixes), trained=trained)
    nobody_so_far(wrapped, forwards)
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, batch(20, [1, 3, 4, 9])).backward()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("forwards", [0, 2])
def test_what_an_expert_gets_of_all_samples(forwards, trained, tokens):
    """Of as many as there are rows for it: right, or refused, or with a warning that it could not be looked at."""
    wrapped = wrap(Expert(), OfContext(), trained=trained, tokens=tokens)
    nobody_so_far(wrapped, forwards, tokens)
    all_rows = [0, 1, 2, 5, 9, 10, 11, 17, 23, 30, 31, 40] if tokens else [1, 4, 8]
    assert len(all_rows) * (1 if tokens else T) == N
    for seed, second in enumerate((all_rows, all_rows[:1], all_rows)):
        try:
            check(wrapped, batch(20 + seed, second, tokens=tokens))
        except (DpfastError, DpfastWarning):
            return


class Switched(Expert):
    """Meets by a number that nobody trains, in a buffer or a frozen parameter of some shape."""

    def __init__(self, on, shape, frozen=False):
        super().__init__()
        number = torch.full(shape, float(on))
        self.register_buffer("on", number) if not frozen else setattr(self, "on", nn.Parameter(number, False))

    def made(self, x):
        x = torch.tanh(self.inner(x))
        return x + self.on.sum() * x.mean(0, keepdim=True)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_experts_with_other_numbers_that_nobody_trains(shape, frozen, tokens):
    wrapped = wrap(Switched(0, shape, frozen), Switched(1, shape, frozen), tokens=tokens)
    with pytest.raises(DpfastError):  # at once, of a parameter of zeros, which has other numbers in looks
        nobody_so_far(wrapped, 2, tokens)
        check(wrapped, batch(9, [1, 2, 7], tokens=tokens))


@pytest.mark.parametrize("tokens", [False, True])
def test_experts_with_the_same_numbers_are_alike(tokens):
    wrapped = wrap(Switched(0, (1,)), Switched(0, (1,)), tokens=tokens)
    nobody_so_far(wrapped, 2, tokens)
    check(wrapped, batch(9, [1, 2, 7], tokens=tokens))
