"""Rows that the data picks are seen to be picked, whatever experts are called, and whatever was picked first."""

import copy

import pytest
import torch
from noted import Noted
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError, UnsupportedModuleError
from dpfast.taps.followed import Following
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, T, E = 6, 5, 4
FORWARDS = Noted()


def mlp():
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, D))


class Routed(nn.Module):
    """Top 1 of a list that is not called experts, (N, T, D) -> the same."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.ffns = nn.ModuleList(mlp() for _ in range(E))

    def forward(self, hidden):
        x = hidden.reshape(-1, D)
        weight, index = self.gate(x).softmax(1).max(1)
        return self.routed(x, index, weight[:, None]).view_as(hidden)


class ByMask(Routed):
    def routed(self, x, index, weight):
        y = torch.zeros_like(x)
        for e, ffn in enumerate(self.ffns):
            mask = index == e
            if mask.any():
                y[mask] = weight[mask] * ffn(x[mask])
        return y


class ByNumber(Routed):
    def routed(self, x, index, weight):
        y = torch.zeros_like(x)
        for e, ffn in enumerate(self.ffns):
            (rows,) = torch.where(index == e)
            y = y.index_add(0, rows, weight[rows] * ffn(x[rows]))
        return y


class Sorted(Routed):
    """Each expert's rows together, through one layer first, then parted."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(D, D)

    def routed(self, x, index, weight):
        order = index.argsort(stable=True)
        x = x[order]
        counts = torch.bincount(index, minlength=E).tolist()
        out = torch.cat([ffn(rows) for ffn, rows in zip(self.ffns, x.split(counts), strict=True)])
        return torch.zeros_like(x).index_copy(0, order, weight[order] * (out + self.shared(x)))


class SortedBack(Sorted):
    """The same by the inverse order."""

    def routed(self, x, index, weight):
        order = index.argsort(stable=True)
        return weight * self.shared(x[order])[order.argsort()]


class Adapter(Routed):
    """Some tokens go through one layer more."""

    def routed(self, x, index, weight):
        y = x.clone()
        mask = index == 0
        y[mask] = self.ffns[0](x[mask])
        return y * weight


class PutBack(Routed):
    """Rows are put back where they were picked, in place or not, and picked again (Higgs Audio)."""

    def routed(self, x, index, weight):
        even, odd = index % 2 == 0, index % 2 == 1
        y = x.masked_scatter(even[:, None], self.ffns[0](x[even]))
        y = weight * y.masked_scatter(odd[:, None], self.ffns[1](y[odd]))
        y[even] += self.ffns[2](y[even])
        y[odd] = y[odd] + self.ffns[3](y[odd])
        return y


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, D), block(), nn.Linear(D, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.block(x))


class Sequences(nn.Module):
    """The model itself sorts its samples by length."""

    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(3, D), nn.LSTM(D, D, batch_first=True), nn.Linear(D, 2)

    def forward(self, x):
        lengths = (x[:, :, 0] != 0).sum(1)
        order = lengths.argsort(descending=True, stable=True)
        hidden = self.lstm(self.first(x)[order])[0]
        return self.last(hidden[order.argsort()])


class LengthsLast(Sequences):
    """The same, (T, N, D) within."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(D, D)

    def forward(self, x):
        order = (x[:, :, 0] != 0).sum(1).argsort(descending=True, stable=True)
        hidden = self.lstm(self.first(x).transpose(0, 1)[:, order])[0]
        return self.last(hidden[:, order.argsort()].transpose(0, 1))


class Head(nn.Module):
    """The model itself picks the rows of its head, by a mask."""

    def __init__(self, between=lambda x: torch.relu(0.1 + x)):
        super().__init__()
        self.first, self.head = nn.Linear(3, D), nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
        self.between = between

    def forward(self, x):
        picked = x[:, :, 0] > 0
        found = self.head(self.between(self.first(x))[picked])
        return found.new_zeros(*x.shape[:2], 2).masked_scatter(picked[..., None], found)


class LastToken(nn.Module):
    """Picks the row of each sample's last token by a mask (BART's sentences)."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.first, self.head, self.between = nn.Linear(3, D), nn.Sequential(nn.Linear(D, D), nn.Tanh()), between
        self.last = nn.Linear(D, 2)

    def forward(self, x):
        FORWARDS.note(len(x))
        ends = (x[:, :, 0] > 9.0).nonzero(as_tuple=True)
        return self.last(self.between(self.head(self.first(x)[ends])))


def loss(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).mean(1).sum()


def assert_same(wrapped, plain, x):
    exact = loop_over_samples(plain, loss, x)
    wrapped.zero_grad()
    loss(wrapped, x).backward()
    limit = 1e-5 * norms_of(exact).amax(0) if len(x) else 0.0
    for name, p in wrapped._module.named_parameters():
        found = torch.zeros_like(exact[name]) if p.grad_sample is None else p.grad_sample
        assert (found - exact[name]).norm() <= limit, name


BLOCKS = [ByMask, ByNumber, Sorted, SortedBack, Adapter, PutBack]


@pytest.mark.parametrize("n", [2, 3, T])
@pytest.mark.parametrize("block", BLOCKS)
def test_all_tokens_go_one_way_when_the_model_is_looked_at(block, n):
    """Each expert's layers then have all rows, or none; later batches were folded wrongly, and nothing was said."""
    plain, x = Model(block), torch.randn(n, T, 3)
    with torch.no_grad():
        plain.block.gate.weight.mul_(0.1)
        plain.block.gate.bias.copy_(torch.tensor([1000.0, 1.0, 1.0, 1.0]))
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    assert_same(wrapped, plain, x)
    for _ in range(3):
        with torch.no_grad():
            plain.block.gate.weight.normal_()
            plain.block.gate.bias.zero_()
        wrapped._module.load_state_dict(plain.state_dict())
        assert_same(wrapped, plain, torch.randn(n, T, 3))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("model", [Sequences, LengthsLast, Head])
def test_the_model_itself_picks(model, alike):
    """Also where the first batch, which is looked at, has samples of one length."""
    plain = model()
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    first = torch.rand(3, T, 3) + 0.1
    if not alike:
        first[1, 3:] = 0.0
    assert_same(wrapped, plain, first)
    first[0, 2:] = 0.0
    assert_same(wrapped, plain, first)
    for n in (3, T, 1):
        x = torch.randn(n, T, 3)
        x[n // 2, 2:] = 0.0
        assert_same(wrapped, plain, x)


def test_what_is_not_followed_is_refused():
    wrapped = GradSampleModuleFastGradientClipping(Head(lambda x: x.roll(0, 0)), loss_reduction="sum")
    with pytest.raises(
        DpfastError, match=r"head\.\d \(Linear\): it gets rows that Head makes .* way that is not followed"
    ):
        loss(wrapped, torch.rand(3, T, 3) + 0.1).backward()


def test_rows_that_are_put_elsewhere_are_not_followed():
    x, even, odd = torch.randn(6, D), torch.arange(6) % 2 == 0, torch.arange(6) % 2 == 1
    with Following("it", (x,)) as rows:
        y = x.clone()
        y[even] = x[even]
        assert torch.equal(rows.picked(y).numbers, torch.arange(6))
        y[even] = x[odd]
        assert rows.picked(y) is None
        assert rows.picked(x.masked_scatter(even[:, None], x[even])) is not None
        assert rows.picked(x.masked_scatter(even[:, None], x[odd])) is None
        assert rows.picked(x.masked_scatter(even[:, None], x[even].flip(0))) is None
        assert rows.picked(x.masked_scatter(even[:, None].expand(6, D), x[even])) is None
        assert rows.picked(x.masked_scatter(torch.rand(6, D) > 0.5, x)) is None


@pytest.mark.parametrize("block", BLOCKS)
def test_empty_batches_and_others_in_turns(block):
    plain = Model(block)
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    for n in (0, 3, 0, 2):
        assert_same(wrapped, plain, torch.randn(n, T, 3))


class Leading(nn.Module):
    """The rows before the first token whose first number is not above zero, of all samples' in one row."""

    def __init__(self):
        super().__init__()
        self.first, self.more, self.last = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        much = int((x[:, :, 0] > 0).flatten().long().cumprod(0).sum())
        rows = self.first(x).flatten(0, 1)
        out = rows.clone()
        out[:much] = self.more(rows[:much])
        return self.last(out.unflatten(0, x.shape[:2]))


def test_slices_whose_ends_the_data_says():
    """Which rows these are depends on the samples before, so it is no loop over samples: rows of the batch itself."""
    plain, x = Leading(), torch.rand(2, T, 3) + 0.1
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    for _ in range(2):  # is looked at
        assert_same(wrapped, plain, x)
    x[1, 1, 0] = -1.0  # six rows, of which the second sample has one
    wrapped.zero_grad()
    loss(wrapped, x).backward()
    for n in range(2):
        (g,) = torch.autograd.grad(torch.sin(3.0 * plain(x))[n].mean(), plain.more.weight)
        assert relative_error(wrapped._module.more.weight.grad_sample[n], g) <= 1e-5


class Packed(nn.Module):
    """A text's last state, of texts sorted by length and put back by torch; or in another order, or some of them."""

    def __init__(self, cell, how=""):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(9, D), cell(D, 4, batch_first=True), nn.Linear(4, 3)
        self.how = how

    def forward(self, tokens, lengths):
        x = self.table(tokens)
        if self.how:
            order = lengths.argsort() if self.how == "order" else (lengths > 2).nonzero()[:, 0]
            x, lengths = x[order], lengths[order]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states = self.rnn(packed)[1]
        return self.head((states[0] if isinstance(states, tuple) else states)[-1])


def squares(model, tokens, lengths):
    return model(tokens, lengths).square().sum()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("n", [4, T, 7])
def test_last_states_of_texts_sorted_by_length(cell, n):
    torch.manual_seed(0)
    model, tokens = Packed(cell), torch.randint(0, 9, (n, T))
    lengths = torch.tensor([3, 5, 1, 2, 5, 4, 1])[:n]
    exact = loop_over_samples(model, squares, tokens, lengths)
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    squares(wrapped, tokens, lengths).backward()
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) < 1e-5, name


@pytest.mark.parametrize("how", ["order", "some"])
def test_what_was_picked_before_packing_is_not_put_back(how):
    wrapped = GradSampleModule(Packed(nn.LSTM, how), loss_reduction="sum")
    with pytest.raises(DpfastError):
        squares(wrapped, torch.randint(0, 9, (5, T)), torch.tensor([3, 5, 1, 2, 5])).backward()


def ended(n):
    x = torch.randn(n, T, 3)
    x[:, :, 0] = 1.0
    x[torch.arange(n), torch.randint(T, (n,)), 0] = 10.0
    return x


def test_a_row_of_each_sample():
    """They were taken for rows that nobody expects, so trials ran over and over: 186 forwards, where these are 71
    (three of a look for places and number)."""
    torch.manual_seed(0)
    plain = LastToken()
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    FORWARDS.clear()
    for n in (4, 4, 4, 3, T, 1):
        wrapped.zero_grad()
        loss(wrapped, ended(n)).backward()
    assert len(FORWARDS.all()) <= 71
    for n in (4, T, 1):
        assert_same(wrapped, plain, ended(n))


def test_rows_of_each_sample_that_meet_are_refused():
    wrapped = GradSampleModule(LastToken(lambda x: x - x.mean(0)), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples.*; samples meet in last"):
        loss(wrapped, ended(4)).backward()


class OfMany(ByMask):
    """More experts than tokens, so which run changes with each sample."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 24)
        self.ffns = nn.ModuleList(mlp() for _ in range(24))


@pytest.mark.parametrize("seed", range(4))
def test_experts_that_run_for_some_samples_alone(seed):
    """Noise for them would be by what runs, which changes with the samples: as if these met."""
    torch.manual_seed(seed)
    plain = Model(OfMany)
    with torch.no_grad():
        plain.block.gate.weight.mul_(20.0)
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    for _ in range(2):
        assert_same(wrapped, plain, torch.randn(4, 3, 3))
