"""Heads on rows that the data picks, behind which samples meet."""

import copy

import pytest
import torch
from own_backwards import BatchMean
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

D, T = 6, 5


PICKS = {
    "mask": lambda h, mask: h[mask],
    "numbers": lambda h, mask: h[mask.nonzero(as_tuple=True)],
    "viewed": lambda h, mask: h[mask, :].view(len(h), -1, D)[:, -1],
    "of all in one": lambda h, mask: h.reshape(-1, D).index_select(0, mask.flatten().nonzero().squeeze(1)),
}


class Heads(nn.Module):
    """On a frozen table's rows."""

    def __init__(self, pick, between, behind):
        super().__init__()
        self.table, self.pick = nn.Embedding(20, D).requires_grad_(False), pick
        self.first, self.norm, self.last = nn.Linear(D, D), nn.GroupNorm(2, D), nn.Linear(D, 2)
        self.between, self.behind = between, behind

    def forward(self, tokens):
        rows = PICKS[self.pick](self.table(tokens).cumsum(1), tokens == 2)
        return self.behind(self.last(torch.tanh(self.norm(self.between(self.first(rows))))))


def loss(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).mean(1).sum()


def same(x):
    return x


def mean_taken_off(x):
    return x - x.mean(0)


@pytest.mark.parametrize("where", ["between", "behind"])
@pytest.mark.parametrize("mixes", [BatchMean.apply, mean_taken_off])
@pytest.mark.parametrize("pick", PICKS)
def test_samples_that_meet_behind_picked_rows_are_refused(pick, mixes, where):
    """No gradient was caught there: in the backward pass they met without a word."""
    torch.manual_seed(0)
    tokens = torch.randint(3, 20, (6, T))
    tokens[torch.arange(6), torch.randint(T, (6,))] = 2
    model = Heads(pick, mixes if where == "between" else same, mixes if where == "behind" else same)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.1, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError):
        loss(wrapped, tokens).backward()
    plain = Heads(pick, same, same)
    exact = loop_over_samples(plain, loss, tokens)
    wrapped = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    loss(wrapped, tokens).backward()
    for name, p in wrapped._module.named_parameters():
        assert not p.requires_grad or relative_error(p.grad_sample, exact[name]) <= 1e-5, name
