"""Models that sort samples by length before their first layer, and put them back afterwards."""

import pytest
import torch
from of_lengths import MODES, D, T, assert_right_in, batch, by_sample, gradients, loss
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


class Encoder(nn.Module):
    """The last states of samples that it sorts; ``way`` says what follows, before they are put back."""

    def __init__(self, way, cell=nn.GRU):
        super().__init__()
        self.table, self.rnn, self.head, self.way = (
            nn.Embedding(20, D),
            cell(D, D, batch_first=True),
            nn.Linear(D, 3),
            way,
        )

    def forward(self, tokens, lengths, classes=None):
        lengths, order = lengths.sort(descending=True, stable=True)
        return self.way(self, self.table(tokens[order]), lengths, order.argsort())


def state(model, x, lengths):
    states = model.rnn(pack_padded_sequence(x, lengths.cpu(), batch_first=True))[1]
    return (states[0] if isinstance(states, tuple) else states)[-1]


def back_before_the_head(model, x, lengths, back):
    return model.head(state(model, x, lengths)[back])


def back_behind_the_head(model, x, lengths, back):
    return model.head(state(model, x, lengths)).index_select(0, back)


def all_tokens(model, x, lengths, back):
    out, _ = model.rnn(pack_padded_sequence(x, lengths.cpu(), batch_first=True))
    return model.head(pad_packed_sequence(out, batch_first=True, total_length=T)[0][back])


def not_packed(model, x, lengths, back):
    mask = (torch.arange(T) < lengths[:, None]).unsqueeze(-1)
    return model.head(((x * mask).sum(1) / lengths[:, None])[back])


def not_put_back(model, x, lengths, back):
    return model.head(state(model, x, lengths))


def by_rank(model, x, lengths, back):
    """How many are longer."""
    return model.head((state(model, x, lengths) * torch.arange(1, len(x) + 1)[:, None])[back])


def with_a_neighbour(model, x, lengths, back):
    x = state(model, x, lengths)
    return model.head((x + x.roll(1, 0))[back])


class Classifier(nn.Module):
    """With the encoder as a part."""

    def __init__(self, way):
        super().__init__()
        self.encoder, self.out = Encoder(way), nn.Linear(3, 3)

    def forward(self, tokens, lengths, classes=None):
        return self.out(self.encoder(tokens, lengths))


def moved(plain):
    """By which part of itself the gradient of the samples but one moves when that is taken out: fp64, the largest."""
    inputs, parts = batch(), []
    for j in range(6):
        rest = torch.tensor([i for i in range(6) if i != j])
        among = gradients(plain, lambda model, *some, rest=rest: by_sample(model, *some)[rest].sum(), *inputs)
        parts.append((among - gradients(plain, loss, *(x[rest] for x in inputs))).norm() / among.norm())
    return float(max(parts))


RIGHT = (back_before_the_head, back_behind_the_head, all_tokens, not_packed)


@pytest.mark.parametrize(
    "plain",
    [*(Encoder(way) for way in RIGHT), Encoder(back_behind_the_head, nn.LSTM), Classifier(back_before_the_head)],
    ids=lambda plain: f"{type(plain).__name__}-{getattr(plain, 'way', state).__name__}",
)
def test_tokens_that_are_sorted_and_put_back(plain):
    assert moved(plain) <= 1e-12
    exact = loop_over_samples(plain, loss, *batch())
    for mode in MODES if getattr(plain, "way", None) is back_before_the_head else ("one pass",):
        assert_right_in(mode, plain, by_sample, exact, *batch())


@pytest.mark.parametrize("way", [not_put_back, by_rank, with_a_neighbour])
def test_what_is_not_put_back_or_depends_on_the_order(way):
    plain = Encoder(way)
    assert moved(plain) >= 1e-2
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples|changes with how long the longest"):
        by_sample(MODES["one pass"](plain), *batch()).sum().backward()


@pytest.mark.parametrize("n", [6, 2])
def test_a_rank_behind_the_table(n):
    """Sorted there, which was followed before: how many are longer was not seen."""

    class Model(Encoder):
        def forward(self, tokens, lengths, classes=None):
            order = lengths.argsort(descending=True, stable=True)
            return self.way(self, self.table(tokens)[order], lengths[order], order.argsort())

    with pytest.raises(UnsupportedModuleError, match="changes with how long the longest"):
        by_sample(MODES["one pass"](Model(by_rank)), *(x[:n] for x in batch())).sum().backward()
    by_sample(MODES["one pass"](Model(back_before_the_head)), *(x[:n] for x in batch())).sum().backward()
