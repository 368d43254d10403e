"""Models that cut or pad all samples to the longest of the batch, without packing: right where they leave padding
out."""

import torch
from of_lengths import D, T, masked_mean, valid
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


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
