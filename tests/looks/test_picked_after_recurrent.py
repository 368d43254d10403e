"""Rows that the data picks out of what recurrent layers and attention give: followed as those of any layer."""

import pytest
import torch
from in_both_modes import check
from torch import nn

from dpfast import GradSampleModule
from dpfast.errors import UnsupportedModuleError

D = 6
LAYERS = {
    "gru": (lambda: nn.GRU(D, D, batch_first=True), 0),
    "lstm of two directions": (lambda: nn.LSTM(D, D // 2, num_layers=2, bidirectional=True, batch_first=True), 0),
    "rnn": (lambda: nn.RNN(D, D, batch_first=True), 0),
    "gru, time first": (lambda: nn.GRU(D, D), 1),
    "attention": (lambda: nn.MultiheadAttention(D, 2, batch_first=True), 0),
    "attention, time first": (lambda: nn.MultiheadAttention(D, 2), 1),
}


class Tagger(nn.Module):
    """A head for each kind of token, on what a layer that looks along the sequence gives."""

    def __init__(self, kind, between=None):
        super().__init__()
        make, self.dim = LAYERS[kind]
        self.table, self.layer, self.heads = nn.Embedding(7, D), make(), nn.ModuleList(nn.Linear(D, 3) for _ in "ab")
        self.between = between or nn.Identity()

    def forward(self, tokens):
        x, tokens = (self.table(tokens), tokens) if self.dim == 0 else (self.table(tokens.T), tokens.T)
        h, _ = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        h = self.between(h)
        scores = h.new_zeros(*tokens.shape, 3)
        for i, head in enumerate(self.heads):
            scores[tokens % 2 == i] = head(h[tokens % 2 == i]).tanh()
        return scores.sum(1 - self.dim)


class OfStates(nn.Module):
    """The same on states, (layers, N, H), a head for each kind of sample."""

    def __init__(self, layer, take):
        super().__init__()
        self.table, self.layer, self.take = nn.Embedding(7, D), layer, take
        self.heads = nn.ModuleList(nn.Linear(D, 3) for _ in "ab")

    def forward(self, tokens):
        h = self.take(self.layer(self.table(tokens)))
        scores = h.new_zeros(len(tokens), 3)
        for i, head in enumerate(self.heads):
            scores[tokens[:, 0] % 2 == i] = head(h[tokens[:, 0] % 2 == i]).tanh()
        return scores


def batches(*sizes):
    return [torch.randint(7, (n, 5)) for n in sizes]


@pytest.mark.parametrize("kind", LAYERS)
def test_heads_get_the_tokens_of_their_kind(kind):
    check(Tagger(kind), *batches(5, 4, 1, 6))


@pytest.mark.parametrize(
    ("layer", "take"),
    [
        (nn.GRU(D, D, batch_first=True, num_layers=2), lambda given: given[1][-1]),
        (nn.GRU(D, D, batch_first=True, num_layers=5), lambda given: given[1][0]),
        (nn.LSTM(D, D, batch_first=True), lambda given: given[1][1][0]),
        (nn.LSTM(D, D, batch_first=True), lambda given: given[0][:, -1]),
    ],
    ids=["the last layer's", "as many layers as samples", "cells", "the last output"],
)
def test_heads_get_the_states_of_their_kind(layer, take):
    check(OfStates(layer, take), *batches(5, 4, 1, 6))


class Rolled(nn.Module):
    def forward(self, h):
        return h.roll(1, 0)


class Centred(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


@pytest.mark.parametrize("between", [Rolled, Centred])
@pytest.mark.parametrize("kind", ["gru", "attention"])
def test_what_brings_samples_together_before_they_are_picked_is_refused(kind, between):
    wrapped = GradSampleModule(Tagger(kind, between()))
    with pytest.raises(UnsupportedModuleError):
        wrapped(*batches(5)).sum().backward()
