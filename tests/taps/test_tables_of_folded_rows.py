"""Tables of positions that get one row (1, T) for all, where samples are folded into rows: choices, frames, chunks."""

import warnings

import pytest
import torch
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import InputError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

N, K, T, D, C = 5, 4, 6, 8, 0.2


class Choices(nn.Module):
    """(N, K, T) tokens -> (N, K)."""

    def __init__(self, expanded=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(20, D), nn.Embedding(T, D)
        self.inner, self.head = nn.Linear(D, D), nn.Linear(D, 1)
        self.expanded = expanded

    def forward(self, x):
        rows = x.flatten(0, 1)
        positions = torch.arange(x.shape[2])[None]
        positions = positions.expand(len(rows), -1) if self.expanded else positions
        h = torch.tanh(self.inner(self.tokens(rows) + self.positions(positions)))
        return self.head(h.mean(1)).view(x.shape[:2])


def losses(model, x):
    return torch.sin(3.0 * model(x)).sum(1)


def tokens(n=N):
    return torch.randint(0, 20, (n, K, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", [GradSampleModule, GradSampleModuleFastGradientClipping])
@pytest.mark.parametrize("n", [K, N])
def test_one_row_for_all_is_refused_with_the_table(mode, n):
    """It was given a row a sample, which does not meet K rows a sample: the forward failed."""
    with pytest.raises(InputError, match=r"positions \(Embedding\): its output is the same whatever the batch"):
        losses(mode(Choices()), tokens(n)).mean().backward()


@pytest.mark.parametrize("n", [K, N])
@pytest.mark.parametrize("how", ["frozen", "expanded"])
def test_it_is_right_frozen_or_expanded(how, n):
    model, x = Choices(expanded=how == "expanded"), tokens(n)
    model.positions.weight.requires_grad_(how == "expanded")
    layout = {"positions": "N*k"} if how == "expanded" else None
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", layout=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            wrapped.zero_grad()
            losses(wrapped, x).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.positions, self.head = nn.Linear(D, D), nn.Embedding(12, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x) + self.positions(torch.arange(x.shape[1])))).sum(1)


@pytest.mark.parametrize("t", [N, T])
def test_evaluation_before_the_first_pass_is_the_plain_model_s(t):
    """Positions as many as samples were an error there, and none in training."""
    model, x = Positions(), torch.randn(N, t, D)
    with torch.no_grad():
        expected = model(x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    with torch.no_grad():
        assert torch.equal(wrapped(x), expected)
    losses(wrapped, x).mean().backward()
    assert wrapped.get_norm_sample().shape == (N,)
