"""Tables of positions that get one row (1, T) for all, where samples are folded into rows: choices, frames, chunks."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dpfast
from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
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


@pytest.mark.parametrize("n", [1, K, N, T])
@pytest.mark.parametrize("how", ["one row", "frozen", "expanded"])
def test_it_is_right(how, n):
    """It was given a row a sample, which does not meet K rows a sample: the forward failed."""
    model = Choices(expanded=how == "expanded")
    model.positions.weight.requires_grad_(how != "frozen")
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=C, loss_reduction="sum")
    for x in (tokens(n), tokens(n), tokens(n)[:, :2], tokens(3)):
        exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped.zero_grad()
            losses(wrapped, x).sum().backward()
        assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
        for name, expected in clipped_sum(exact, C).items():
            found = wrapped._module.get_parameter(name).grad
            if how == "frozen" and name == "positions.weight":
                assert found is None
            else:
                assert relative_error(found, expected) <= 1e-4, name


@pytest.mark.parametrize("n", [1, K, N])
def test_it_is_right_by_sample(n):
    model, x = Choices(), tokens(n)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


def test_it_is_compiled():
    model, x = Choices(), tokens()
    expected = clipped_sum(loop_over_samples(copy.deepcopy(model), lambda m, x: losses(m, x).sum(), x), C)
    dpfast.compile_step(model, losses, max_grad_norm=C, batch_size=N + 1)(x)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, expected[name]) <= 1e-4, name


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
