"""Samples that meet in the backward pass alone, in a model that also returns, keeps or makes what mixes samples: that
had kept the whole model from being looked at."""

import copy

import pytest
import torch
from own_backwards import BatchMean
from torch import nn

from dpfast import GradSampleModule
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

N, T, D, CLASSES = 5, 4, 8, 3


class Similar(nn.Module):
    def forward(self, h):
        return h @ h.t()


class Model(nn.Module):
    """Two layers, and what a user's loss does not take.

    Attributes:
        beside: what else is returned, of the first layer's output; None: it is kept in an attribute.
    """

    def __init__(self, beside, between=None):
        super().__init__()
        self.first, self.head, self.similar = nn.Linear(D, D), nn.Linear(D, CLASSES), Similar()
        self.beside, self.between = beside, between or nn.Identity()

    def forward(self, x):
        h = torch.tanh(self.first(x))
        y = self.head(self.between(h))
        if self.beside is None:
            self.kept = h @ h.t()
            return y, None
        return y, self.beside(self, h, y)


BESIDE = {
    "similarities": lambda m, h, y: h @ h.t(),
    "in a module of their own": lambda m, h, y: m.similar(h),
    "less the mean": lambda m, h, y: h - h.mean(0),
    "softmax over the batch": lambda m, h, y: y.softmax(0),
    "kept": None,
    "means of three classes": lambda m, h, y: y.softmax(1).mean(0),
    "their confusion": lambda m, h, y: y.softmax(1).t() @ y.softmax(1),
}


class Meets(nn.Module):
    def forward(self, x):
        return BatchMean.apply(x)


def loss(model, x):
    return torch.sin(3.0 * model(x)[0]).sum()


@pytest.mark.parametrize("beside", BESIDE)
def test_they_are_refused(beside):
    torch.manual_seed(0)
    wrapped = GradSampleModule(Model(BESIDE[beside], Meets()), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"first \(Linear\)"):
        loss(wrapped, torch.randn(N, D)).backward()


@pytest.mark.parametrize("beside", BESIDE)
def test_others_are_right(beside):
    torch.manual_seed(0)
    model, x = Model(BESIDE[beside]), torch.randn(N, D)
    exact = loop_over_samples(copy.deepcopy(model), loss, x)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    for _ in range(2):
        wrapped.zero_grad()
        loss(wrapped, x).backward()
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


class WithPositions(nn.Module):
    """Positions go through a layer as (N * T, D), and the mean of the batch is returned as well."""

    def __init__(self):
        super().__init__()
        self.table, self.of_positions, self.head = nn.Embedding(T, D), nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        positions = self.table(torch.arange(T).repeat(len(x)).view(len(x), T)).flatten(0, 1)
        h = x + self.of_positions(positions).view(len(x), T, D)
        return self.head(torch.tanh(h).mean(1)), h.mean(1).mean(0, keepdim=True).expand(2, -1)


def test_positions_beside_a_mean():
    """In the mean all samples' gradients change, so it does not tell the order of rows."""
    torch.manual_seed(0)
    model, x = WithPositions(), torch.randn(N, T, D)
    exact = loop_over_samples(copy.deepcopy(model), loss, x)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
