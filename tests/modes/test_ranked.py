"""Losses that choose samples by their ranks in the batch, behind the model's outputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

N, D, T = 4, 5, 4


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, outputs))


def own(y):
    return y.flatten(1).square().sum(1)


def cross_entropies(y):
    return F.cross_entropy(y, torch.arange(len(y)), reduction="none")


RANK = {
    "topk": lambda y: own(y).topk(2)[0].mean(),
    "kthvalue": lambda y: own(y).kthvalue(2)[0],
    "max": lambda y: own(y).max(),
    "min": lambda y: own(y)[:, None].min(0)[0].sum(),
    "amax": lambda y: own(y).amax(),
    "sort": lambda y: own(y).sort(descending=True)[0][:2].sum(),
    "sort, by two quantiles": lambda y: torch.quantile(own(y), torch.tensor([0.2, 0.5])).sum(),
    "(sort|gather), by a quantile": lambda y: torch.quantile(own(y), 0.5),
    "(sort|gather), by a lower quantile": lambda y: torch.quantile(y, 0.5, dim=0, interpolation="lower").sum(),
    "gather": lambda y: own(y).gather(0, own(y).argmax(0, keepdim=True)).sum(),
    "median": lambda y: own(y).median(),
    "max, of outputs": lambda y: y.max(0)[0].sum(),
    "topk, of all entries": lambda y: y.square().flatten().topk(3)[0].sum(),
    "sort, of all entries": lambda y: y.flatten(0, 1).sort(descending=True)[0][:3].sum(),
    "max, of all entries": lambda y: y.mT.reshape(-1).square().max(),
    "max, of some entries": lambda y: y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.8].max(),
    "max, of what adds up to nothing": lambda y: (y - y.mean(1, keepdim=True)).max(),
    "amax, of a class": lambda y: (
        torch.where(torch.eye(40, N, dtype=torch.bool).roll(17, 0), own(y), 0.0).amax(1).sum()
    ),
    "amax, of all entries": lambda y: y.square().amax((0, 1)),
    "topk, of cross entropies": lambda y: cross_entropies(y).topk(2)[0].mean(),
}
RANK_CLASSES = {
    "largest class": lambda y: y.max(1)[0].square().sum(),
    "largest classes": lambda y: y.topk(2, -1)[0].square().sum(),
    "sorted classes": lambda y: (y.sort(1)[0] * torch.arange(y.shape[1])).square().sum(),
    "in a loop": lambda y: sum(row.topk(2)[0].square().sum() + row.max() ** 2 for row in y),
    "a class by its label": lambda y: y.gather(1, torch.full((len(y), 1), 2)).square().sum(),
    "samples in an order": lambda y: y.gather(0, torch.arange(len(y)).flip(0)[:, None].expand(y.shape)).square().sum(),
    "of rows of classes": lambda y: y.reshape(-1, 2).max(1)[0].square().sum(),
    "the better of two": lambda y: torch.stack([own(y), own(y - 1.0)]).min(0)[0].sum(),
}


def wrapped(model):
    return dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")


@pytest.mark.parametrize("name", RANK)
def test_samples_that_are_ranked_are_refused(name):
    model = network(N)  # as many classes as samples
    with pytest.raises(UnsupportedModuleError, match=f"{name.partition(',')[0]} ranks the samples of the batch"):
        RANK[name](wrapped(model)(torch.randn(N, D))).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", RANK_CLASSES)
def test_each_samples_own_ranks_are_right(name):
    model, x = network(N), torch.randn(N, D)
    exact = norms_of(loop_over_samples(model, lambda m, x: RANK_CLASSES[name](m(x)), x))
    private = wrapped(model)
    RANK_CLASSES[name](private(x)).backward()
    assert relative_error(private.get_norm_sample(), exact) <= 1e-5


def test_ranks_over_time_are_each_samples_own():
    """As long as the batch."""
    model, x = network(3), torch.randn(N, T, D)

    def loss(y):
        return (y.max(1)[0].square() + y.sort(1)[0][:, :2].sum(1)).sum() + y.amax(dim=(1, 2)).square().sum()

    exact = norms_of(loop_over_samples(model, lambda m, x: loss(m(x)), x))
    private = wrapped(model)
    loss(private(x)).backward()
    assert relative_error(private.get_norm_sample(), exact) <= 1e-5
