"""Parameters that a forward writes into a matrix of zeros (LU factors of flows) are right, and none is lost."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import EscapedGradientError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

D, C = 4, 0.3
LOWER, UPPER, DIAGONAL = torch.tril_indices(D, D, -1), torch.triu_indices(D, D, 1), torch.arange(D)


def by_index(matrix, where, x):
    matrix[where[0], where[1]] = x
    return matrix


def by_put(matrix, where, x):
    matrix.index_put_((where[0], where[1]), x)
    return matrix


def by_copy(matrix, where, x):
    matrix.copy_(torch.zeros_like(matrix).index_put((where[0], where[1]), x) + matrix)
    return matrix


def by_scatter(matrix, where, x):
    matrix.view(-1).scatter_(0, where[0] * D + where[1], x)
    return matrix


class Factors(nn.Module):
    """x -> (x L U, log |det|), the diagonal by a function that is used twice."""

    def __init__(self, write):
        super().__init__()
        self.lower, self.upper = (nn.Parameter(torch.randn(D * (D - 1) // 2)) for _ in range(2))
        self.diagonal, self.bias, self.write = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D)), write

    def forward(self, x):
        diagonal = F.softplus(self.diagonal) + 1e-3
        lower = self.write(x.new_zeros(D, D), LOWER, self.lower) + torch.eye(D, dtype=x.dtype)
        upper = self.write(x.new_zeros(D, D), UPPER, self.upper)
        upper = self.write(upper, (DIAGONAL, DIAGONAL), diagonal)
        return F.linear(F.linear(x, upper), lower, self.bias), diagonal.log().sum() * x.new_ones(len(x))


def tanh_inside(x):
    """As splines of flows: entries that a mask picks, which no run without values can do."""
    inside, y = x.abs() < 1, x.clone()
    y[inside] = torch.tanh(x[inside])
    return y


class Flow(nn.Module):
    def __init__(self, write, bend=torch.tanh):
        super().__init__()
        self.factors, self.inner, self.others, self.bend = Factors(write), nn.Linear(D, D), Factors(write), bend

    def forward(self, x):
        y, more = self.factors(x)
        z, even_more = self.others(self.bend(y))
        return -0.5 * self.inner(self.bend(z)).square().sum(1) + more + even_more


WAYS = [by_index, by_put, by_copy, by_scatter]


@pytest.mark.parametrize("n", [1, 3, D])
@pytest.mark.parametrize("write", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("bend", [torch.tanh, tanh_inside], ids=lambda f: f.__name__)
def test_they_are_right(write, bend, n):
    torch.manual_seed(0)
    model, x = Flow(write, bend).double(), torch.randn(n, D).double()
    exact = loop_over_samples(copy.deepcopy(model), lambda m, x: m(x).sum(), x)
    wrapped = dpfast.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    clipping = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    for _ in range(2):
        for m in (wrapped, clipping):
            m.zero_grad()
            m(x).sum().backward()
    sums = clipped_sum(exact, C)
    for name, expected in exact.items():
        assert relative_error(wrapped._module.get_parameter(name).grad_sample, expected) <= 1e-6, name
        assert relative_error(model.get_parameter(name).grad, sums[name]) <= 1e-6, name
    assert relative_error(clipping.get_norm_sample(), norms_of(exact)) <= 1e-6


@pytest.mark.parametrize("write", WAYS, ids=lambda w: w.__name__)
def test_those_of_another_module_are_refused(write):
    """Which has no forward of its own that could be repeated sample by sample."""

    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.other = nn.Linear(D, D), nn.Embedding(1, D)

        def forward(self, x):
            return F.linear(self.first(x), write(x.new_zeros(D, D), (DIAGONAL, DIAGONAL), self.other.weight[0].exp()))

    with pytest.raises(EscapedGradientError, match="other"):
        dpfast.GradSampleModule(Borrows())(torch.randn(3, D)).sum().backward()
