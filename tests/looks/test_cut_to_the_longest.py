"""Models that cut all samples to the longest of the batch, without packing: right where they leave padding out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from of_lengths import (
    LENGTHS,
    MODES,
    D,
    T,
    assert_right_in,
    batch,
    by_sample,
    loss,
    masked_mean,
    moved_by_the_longest,
    that_the_longest_moves,
    valid,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")

FOURTH = torch.tensor([0, 2, 4, 1, 3, 5])  # of three samples and of five, others are the longest


def counted(tokens):
    return (tokens != 0).sum(1)


def packed(model, tokens, lengths):
    """And padded again, to the longest."""
    rows = pack_padded_sequence(model.table(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(model.rnn(rows)[0], batch_first=True)[0], lengths


CUTS = {
    "what the table gave": lambda model, tokens, lengths: (model.table(tokens)[:, : lengths.max()], lengths),
    "tokens": lambda model, tokens, lengths: (model.table(tokens[:, : int(lengths.amax())]), lengths),
    "a list's": lambda model, tokens, lengths: (model.table(tokens)[:, : max(lengths.tolist())], lengths),
    "counted": lambda model, tokens, lengths: (model.table(tokens[:, : counted(tokens).max()]), counted(tokens)),
}


class Model(nn.Module):
    def __init__(self, way, cut=CUTS["what the table gave"]):
        super().__init__()
        self.table, self.mid, self.head = nn.Embedding(20, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.scores, self.norm, self.conv = nn.Linear(D, 1), nn.LayerNorm(D), nn.Conv1d(D, D, 3, padding=1)
        self.positions, self.cell, self.rnn = nn.Embedding(T, D), nn.GRUCell(D, D), nn.GRU(D, D, batch_first=True)
        self.way, self.cut = way, cut

    def forward(self, tokens, lengths, classes=None):
        return self.way(self, *self.cut(self, tokens, lengths))


def mean_of_own(model, x, lengths):
    return model.head(masked_mean(model.mid(x), lengths))


def tokens_of_all(model, x, lengths):
    return model.head(model.norm(model.mid(x)))


def attention(model, x, lengths):
    x = model.mid(x)
    x = x + model.attention(x, x, x, key_padding_mask=~valid(x, lengths)[..., 0], need_weights=False)[0]
    return model.head(masked_mean(x, lengths))


def maximum_of_own(model, x, lengths):
    return model.head(model.mid(x).masked_fill(~valid(x, lengths), -torch.inf).amax(1))


def convolved(model, x, lengths):
    return model.head(masked_mean(model.conv((x * valid(x, lengths)).transpose(1, 2)).transpose(1, 2), lengths))


def folded(model, x, lengths):
    """Rows behind the longest."""
    return model.head(masked_mean(model.mid(x.reshape(-1, D)).view(x.shape), lengths))


def positions(model, x, lengths):
    """A table as long as the longest, and a part of it."""
    x = x + model.positions(torch.arange(x.shape[1])) + model.positions.weight[: x.shape[1]]
    return model.head(masked_mean(model.mid(x), lengths))


def step_by_step(model, x, lengths):
    """As many steps as the longest has."""
    state = x.new_zeros(x.shape[0], D)
    for t in range(x.shape[1]):
        state = torch.where((t < lengths)[:, None], model.cell(x[:, t], state), state)
    return model.head(state)


def mean(model, x, lengths):
    return model.head(model.mid(x).mean(1))


def softmax(model, x, lengths):
    return model.head((model.scores(x).softmax(1) * x).sum(1))


def attention_to_padding(model, x, lengths):
    x = model.mid(x)
    return model.head(masked_mean(x + model.attention(x, x, x, need_weights=False)[0], lengths))


def relative_positions(model, x, lengths):
    return model.head(masked_mean(model.mid(x) * torch.arange(x.shape[1])[:, None] / x.shape[1], lengths))


def the_longest_subtracted(model, x, lengths):
    """What that sample has, and not how long it is."""
    x = masked_mean(model.mid(x), lengths)
    return model.head(x - x[lengths.argmax()])


def folded_mean(model, x, lengths):
    return model.head(model.mid(x.reshape(-1, D)).view(x.shape).mean(1))


def positions_from_the_end(model, x, lengths):
    """Of the longest."""
    x = x + model.positions(torch.arange(x.shape[1]).flip(0))
    return model.head(masked_mean(model.mid(x), lengths))


def as_many_steps_as_the_longest(model, x, lengths):
    state = x.new_zeros(x.shape[0], D)
    for t in range(x.shape[1]):
        state = model.cell(x[:, t], state)
    return model.head(state)


def statistics(model, x, lengths):
    x = model.mid(x)
    return model.head(masked_mean((x - x.mean((0, 1))) / x.std((0, 1)), lengths))


def by_all_lengths(model, x, lengths):
    return mean_of_own(model, x, lengths) / lengths.sum()


def seen_by_long_ones(model, x, lengths):
    """By those alone, so the shortest tell nothing."""
    x = masked_mean(model.mid(x), lengths)
    return model.head(torch.where((lengths > 5)[:, None], x * lengths.max(), x))


RIGHT = (mean_of_own, tokens_of_all, attention, maximum_of_own, convolved, folded, positions, step_by_step)
CHANGES = "changes with how long the longest sequence of the batch is, or with what is in it"
MIXED = "depends on several samples|changes with a sample that is not its own"
WRONG = {
    mean: CHANGES,
    softmax: CHANGES,
    attention_to_padding: CHANGES,
    relative_positions: CHANGES,
    folded_mean: CHANGES,
    positions_from_the_end: CHANGES,
    as_many_steps_as_the_longest: CHANGES,
    the_longest_subtracted: f"{CHANGES}|{MIXED}",
    statistics: MIXED,
    by_all_lengths: MIXED,
    seen_by_long_ones: CHANGES,
}


def assert_right(plain, *inputs):
    exact = loop_over_samples(plain, loss, *inputs)
    for mode in MODES if getattr(plain, "way", None) is attention else ("one pass",):
        assert_right_in(mode, plain, by_sample, exact, *inputs)


@pytest.mark.parametrize("way", RIGHT, ids=lambda way: way.__name__)
@pytest.mark.parametrize("order", [torch.arange(6), FOURTH], ids=["second", "fourth"])
def test_what_leaves_padding_out(way, order):
    plain = Model(way)
    assert moved_by_the_longest(plain) <= 1e-12
    assert_right(plain, *(x[order] for x in batch()))


def test_what_the_first_samples_do_not_show():
    """Three of which none is so long; with all of them the longest is not among those that are exchanged."""
    refused(Model(seen_by_long_ones), CHANGES, *(x[FOURTH] for x in batch()))


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "what the table gave"])
def test_other_ways_to_cut(cut):
    assert_right(Model(attention, CUTS[cut]), *batch())
    refused(Model(mean, CUTS[cut]), CHANGES, *batch())


def refused(plain, match, *inputs):
    with pytest.raises(UnsupportedModuleError, match=match):
        by_sample(MODES["one pass"](plain), *inputs).sum().backward()


@pytest.mark.parametrize("way", WRONG, ids=lambda way: way.__name__)
def test_what_depends_on_the_longest(way):
    refused(that_the_longest_moves(lambda: Model(way)), WRONG[way], *batch())


def test_what_the_longest_has_counts_where_others_are_as_long():
    """The sample that stays is the one that is taken out."""
    tokens, lengths, classes = batch()
    lengths = torch.tensor([9, 9, 3, 9, 2, 9])
    tokens = torch.randint(1, 20, (6, T)) * (torch.arange(T) < lengths[:, None])
    refused(Model(the_longest_subtracted), f"{CHANGES}|{MIXED}", tokens, lengths, classes)
    by_sample(MODES["one pass"](Model(attention)), tokens, lengths, classes).sum().backward()


@pytest.mark.parametrize("way", [folded, positions])
@pytest.mark.parametrize("order", [torch.arange(6), FOURTH], ids=["second", "fourth"])
def test_what_is_padded_again(way, order):
    plain = Model(way, packed)
    assert moved_by_the_longest(plain) <= 1e-12
    assert_right(plain, *(x[order] for x in batch()))


@pytest.mark.parametrize("way", [folded_mean, positions_from_the_end, relative_positions])
@pytest.mark.parametrize("order", [torch.arange(6), FOURTH], ids=["second", "fourth"])
def test_what_is_padded_again_and_depends_on_the_longest(way, order):
    plain = that_the_longest_moves(lambda: Model(way, packed))
    refused(plain, "changes with how long the longest sequence", *(x[order] for x in batch()))


@pytest.mark.parametrize("way", [positions, folded])
@pytest.mark.parametrize("cut", [CUTS["tokens"], packed])
def test_the_longest_of_three_samples_is_as_long_as_they_are_many(way, cut):
    """And so is that of five."""
    tokens, _, classes = batch()
    lengths = torch.tensor([3, 1, 2, 4, 5, 9])
    tokens = torch.randint(1, 20, (6, T)) * (torch.arange(T) < lengths[:, None])
    assert_right(Model(way, cut), tokens, lengths, classes)


class OfTwo(nn.Module):
    """An encoder and a decoder, each cut to its own longest."""

    def __init__(self, masked=True):
        super().__init__()
        self.table, self.mid, self.head = nn.Embedding(20, D), nn.Linear(D, D), nn.Linear(D, 20)
        self.attention, self.masked = nn.MultiheadAttention(D, 2, batch_first=True), masked

    def forward(self, tokens, lengths, targets):
        to = counted(targets)
        x, y = self.table(tokens[:, : lengths.max()]), self.table(targets[:, : to.max()])
        mask = ~valid(x, lengths)[..., 0] if self.masked else None
        y = y + self.attention(self.mid(y), x, x, key_padding_mask=mask, need_weights=False)[0]
        losses = F.cross_entropy(self.head(y).transpose(1, 2), targets[:, : to.max()], reduction="none")
        return (losses * valid(y, to)[..., 0]).sum(1) / to


def test_an_encoder_and_a_decoder_of_other_lengths():
    tokens, lengths, _ = batch()
    targets = tokens.flip(1).flip(0) % 19 + 1
    targets *= torch.arange(T) < torch.tensor([4, 2, 5, 3, 8, 1])[:, None]
    assert_right(OfTwo(), tokens, lengths, targets)
    refused(OfTwo(masked=False), CHANGES, tokens, lengths, targets)


class Takes(nn.Module):
    """So many samples and no more, where the longest of them cannot be one more."""

    def __init__(self):
        super().__init__()
        self.inner = Model(attention)

    def forward(self, tokens, lengths, classes=None):
        if len(tokens) not in (3, 5, 6):
            raise ValueError("so many samples are not taken")
        return self.inner(tokens, lengths, classes)


def test_what_cannot_be_told_stays_refused():
    warnings.simplefilter("ignore", DpfastWarning)  # of what it does not take
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        by_sample(MODES["one pass"](Takes()), *batch()).sum().backward()


def test_a_sample_of_no_length():
    lengths = LENGTHS.clone()
    lengths[4] = 0
    tokens, _, classes = batch()
    tokens = tokens * (torch.arange(T) < lengths[:, None])

    def way(model, x, lengths):
        return model.head((model.mid(x) * valid(x, lengths)).sum(1) / lengths[:, None].clamp(min=1))

    assert_right(Model(way), tokens, lengths, classes)
    refused(Model(mean), f"{CHANGES}|{MIXED}", tokens, lengths, classes)  # its own mean, alone, is no number
