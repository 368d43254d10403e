"""Layers on the rows of packed sequences, and on samples that are taken out of the padding one by one."""

import pytest
import torch
from of_lengths import C, D, assert_right_in, batch, by_sample, loss, moved_by_the_longest
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, unpack_sequence, unpad_sequence

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError
from dpfast.testing import loop_over_samples

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.table, self.head, self.mid = nn.Embedding(20, D), nn.Linear(D, 3), nn.Linear(D, D)
        self.rnn, self.more, self.way = nn.LSTM(D, D, batch_first=True), nn.GRU(D, D, batch_first=True), way

    def forward(self, tokens, lengths, classes=None):
        return self.head(self.way(self, tokens, lengths))


def packed(x, lengths):
    return pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)


def with_rows(rows, data):
    return PackedSequence(data, *rows[1:])


def table_of_rows(model, tokens, lengths):
    rows = packed(tokens, lengths)
    return model.rnn(with_rows(rows, model.table(rows.data)))[1][0][-1]


def between_two(model, tokens, lengths):
    rows, _ = model.rnn(packed(model.table(tokens), lengths))
    return model.more(with_rows(rows, model.mid(rows.data).relu()))[1][-1]


def unpadded(model, tokens, lengths):
    x = unpad_sequence(model.mid(model.table(tokens)), lengths, batch_first=True)
    return torch.stack([own.mean(0) for own in x])


def unpacked(model, tokens, lengths):
    return torch.stack([own.amax(0) for own in unpack_sequence(model.rnn(packed(model.table(tokens), lengths))[0])])


@pytest.mark.parametrize("way", [table_of_rows, between_two, unpadded, unpacked])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 3, 5], [1, 3, 5, 2, 0, 4]])
def test_rows_of_packed(way, order):
    plain, inputs = Model(way), [x[order] for x in batch()]
    assert moved_by_the_longest(plain) <= 1e-12
    assert_right_in("one pass", plain, by_sample, loop_over_samples(plain, loss, *inputs), *inputs)


def statistics_of_rows(model, tokens, lengths):
    rows, _ = model.rnn(packed(model.table(tokens), lengths))
    data = model.mid(rows.data)
    return model.more(with_rows(rows, data - data.mean(0)))[1][-1]


def less_the_first(model, tokens, lengths):
    x = unpad_sequence(model.mid(model.table(tokens)), lengths, batch_first=True)
    return torch.stack([own.mean(0) - x[0].mean(0) for own in x])


def rows_backwards(model, tokens, lengths):
    """Each at another one's place."""
    rows, _ = model.rnn(packed(model.table(tokens), lengths))
    return model.more(with_rows(rows, model.mid(rows.data.flip(0))))[1][-1]


@pytest.mark.parametrize("way", [statistics_of_rows, less_the_first, rows_backwards])
def test_rows_that_meet_others(way):
    model = GradSampleModuleFastGradientClipping(Model(way), max_grad_norm=C, loss_reduction="sum")
    with pytest.raises(DpfastError):
        by_sample(model, *batch()).sum().backward()


def test_one_samples_rows_and_those_of_all():
    """What one sample's are picked out of is no longer one sample's: its memory is that of all."""

    def way(model, tokens, lengths):
        x = model.table(tokens)
        unpad_sequence(x, lengths, batch_first=True)
        out, rows = torch.zeros_like(x), tokens > 5
        out[rows] = model.mid(x[rows])
        return out.sum(1)

    plain = Model(way)
    assert_right_in("one pass", plain, by_sample, loop_over_samples(plain, loss, *batch()), *batch())
