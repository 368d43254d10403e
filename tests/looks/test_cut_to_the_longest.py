"""Models that cut all samples to the longest of the batch, without packing: right where they leave padding out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from cut_to_the_longest import (
    CHANGES,
    CUTS,
    MIXED,
    RIGHT,
    WRONG,
    Model,
    attention,
    counted,
    folded,
    folded_mean,
    mean,
    packed,
    positions,
    positions_from_the_end,
    relative_positions,
    seen_by_long_ones,
    the_longest_subtracted,
)
from of_lengths import (
    LENGTHS,
    MODES,
    D,
    T,
    assert_right_in,
    batch,
    by_sample,
    loss,
    moved_by_the_longest,
    that_the_longest_moves,
    valid,
)
from torch import nn

from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")

FOURTH = torch.tensor([0, 2, 4, 1, 3, 5])  # of three samples and of five, others are the longest


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
