"""Losses of straight pieces behind the model's outputs: hinges, absolute values, the larger of two."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

N, D, T = 5, 6, 5


def network(outputs, inputs=D):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs))


def own(y):
    return y.flatten(1).square().sum(1)


PAIRS = {
    "relu, of a difference": lambda y: F.relu(1 - (y[0, 0] - y[1, 0])) + own(y).sum(),
    "relu, of one that is below": lambda y: F.relu(y[0, 0] - y[1, 0] - 100.0) + own(y).sum(),
    "relu, of neighbours": lambda y: F.relu(own(y)[1:] - own(y)[:-1]).sum(),
    "clampmin, of ranks": lambda y: F.margin_ranking_loss(y[:-1, 0], y[1:, 0], torch.ones(N - 1)),
    "abs, of all pairs": lambda y: (y[:, None] - y).abs().sum(),
    "abs, of pairs apart": lambda y: (y[:2] - y[3:]).abs().sum(),
    "abs, of one with another": lambda y: torch.cat([own(y)[:1] + own(y)[1:2], own(y)[1:]]).abs().sum(),
    "abs, of the mean loss above a floor": lambda y: (own(y).mean() - 0.1).abs() + 0.1,
    "clamp, of the mean loss": lambda y: own(y).mean().clamp(max=1e3),
    "clampmin, of a batch's mean (free bits)": lambda y: y.square().mean(0).clamp_min(0.1).sum(),
    "maximum, of neighbours": lambda y: torch.maximum(own(y), own(y).roll(1)).sum(),
    "maximum, of a sample and the mean": lambda y: torch.maximum(own(y), own(y).mean()).sum(),
    "fmax, of two": lambda y: torch.fmax(own(y)[0], own(y)[1]),
    "where, of two": lambda y: torch.where(own(y) > 0.1, own(y), own(y).flip(0)).sum(),
    "smoothl1loss, of two": lambda y: F.smooth_l1_loss(y[:2], y[2:4], reduction="sum", beta=1e-6),
    "leakyrelu, of rows": lambda y: F.leaky_relu(y.mT - y.mT.roll(1, 1)).sum(),
    "linalgvectornorm, of a class": lambda y: torch.linalg.vector_norm(y - y.roll(1, 0), 1),
    "cdist, of outputs": lambda y: torch.cdist(y, y).sum(),
    "pdist, of outputs": lambda y: F.pdist(y).sum(),
}
APART = {
    "hinge": lambda y: F.relu(1 - y).sum() + y.clamp(-0.1, 0.1).sum() + F.hardtanh(y).sum(),
    "classes beside classes": lambda y: F.relu(y[:, 1:] - y[:, :-1]).sum() + (y[:, :, None] - y[:, None]).abs().sum(),
    "the larger of two of one": lambda y: torch.maximum(own(y), own(y - 0.1)).sum() + torch.fmin(y, -y).sum(),
    "beside a constant": lambda y: torch.where(y > 0, y, 0.0).sum() + torch.maximum(y, torch.zeros(())).sum(),
    "in a loop": lambda y: sum(F.relu(row - 0.1).sum() + (row[0] - row[1]).abs() for row in y),
    "transposed": lambda y: y.mT.abs().sum() + F.relu(y.mT.contiguous().view(-1)).sum(),
    "none that is not finite": lambda y: torch.where(own(y).sum().isfinite(), own(y).sum(), 0.0),
    "spectra": lambda y: torch.fft.rfft(y).abs().sum() + F.l1_loss(y.cumsum(1), y, reduction="sum"),
    "norms": lambda y: torch.linalg.vector_norm(y, 1, 1).sum() + torch.linalg.vector_norm(y, torch.inf, 1).sum(),
}


def wrapped(model):
    return dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")


@pytest.mark.parametrize("outputs", [N, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_bends_where_samples_meet_are_refused(name, outputs):
    model = network(outputs)
    with pytest.raises(UnsupportedModuleError, match=f"{name.partition(',')[0]} takes an entry that comes of several"):
        PAIRS[name](wrapped(model)(torch.randn(N, D))).backward()
    assert all(p.grad is None for p in model.parameters())


def test_the_larger_of_a_batchs_largest_entries_is_refused():
    with pytest.raises(UnsupportedModuleError, match="linalgvectornorm ranks the samples"):
        torch.linalg.vector_norm(wrapped(network(3))(torch.randn(N, D)), torch.inf).backward()


@pytest.mark.parametrize("outputs", [N, 3])
@pytest.mark.parametrize("name", APART)
@pytest.mark.filterwarnings("error")
def test_each_samples_own_bends_are_right(name, outputs):
    model, x = network(outputs), torch.randn(N, D)
    exact = norms_of(loop_over_samples(model, lambda m, x: APART[name](m(x)), x))
    private = wrapped(model)
    APART[name](private(x)).backward()
    assert relative_error(private.get_norm_sample(), exact) <= 1e-5


def test_bends_over_time_are_each_samples_own():
    """As long as the batch, samples in the second dimension."""
    model, x = network(3), torch.randn(T, N, D)

    def loss(y):
        return y.diff(dim=0).abs().sum() + F.relu(y.flatten(0, 1) - 0.1).sum() + y.transpose(0, 1).clamp_min(0).sum()

    exact = norms_of(loop_over_samples(model, lambda m, x: loss(m(x)), x, batch_dim=1))
    private = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", batch_first=False)
    loss(private(x)).backward()
    assert relative_error(private.get_norm_sample(), exact) <= 1e-5


def test_a_bend_of_a_loss_that_the_model_returns_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network(3)

        def forward(self, x):
            return own(self.inner(x)).sum()

    with pytest.raises(UnsupportedModuleError, match="clamp takes an entry"):
        wrapped(Model())(torch.randn(N, D)).clamp(max=1e3).backward()


def test_units_are_kept_apart_not_their_samples():
    units = torch.tensor([0, 0, 1, 1]), 2
    private = wrapped(network(3))
    with private.units(*units):
        y = private(torch.randn(4, D))
        (F.relu(y[0] - y[1]).sum() + F.relu(y[2] - y[3]).sum()).backward()
    private = wrapped(network(3))
    with private.units(*units), pytest.raises(UnsupportedModuleError, match="relu takes an entry"):
        y = private(torch.randn(4, D))
        F.relu(y[1] - y[2]).sum().backward()


SPREAD = {
    "mse": lambda y, target: F.mse_loss(y, target, reduction="sum"),
    "l1": lambda y, target: F.l1_loss(y, target, reduction="sum"),
    "smooth l1": lambda y, target: F.smooth_l1_loss(y, target, reduction="sum"),
    "by hand": lambda y, target: (y - target).square().sum(),
    "the other way round": lambda y, target: (target[:, None] - y[:, 0]).square().sum(),
    "of classes": lambda y, target: (1 - y * target).clamp_min(0).sum(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", SPREAD)
def test_targets_of_all_samples_beside_each_output_are_said(name):
    with pytest.warns(DpfastWarning, match=r"spreads a tensor .* over \(5, 5\)"):
        SPREAD[name](wrapped(network(1))(torch.randn(N, D)), torch.randn(N)).backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(N, 1), (), (3,), (1, 7)], ids=str)
def test_nothing_is_said_of_other_shapes(shape):
    (wrapped(network(1))(torch.randn(N, D)) - torch.randn(shape)).square().sum().backward()


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_a_sum_over_samples():
    (wrapped(network(3))(torch.randn(N, D)).sum(0) * torch.ones(N, 3)).sum().backward()


ORDERS = {
    "reverse": lambda i: i.flip(0),
    "neighbours": lambda i: i.roll(1),
    "in pairs": lambda i: i.view(-1, 2).flip(1).flatten(),
    "other half": lambda i: i.roll(len(i) // 2),
    "reverse halves": lambda i: i.view(2, -1).flip(1).flatten(),
}


@pytest.mark.parametrize("n", [4, 6, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("order", ORDERS)
def test_samples_are_seen_to_meet_in_every_usual_order(order, n):
    """A half of the batch that an order keeps would show nothing of it: the Thue-Morse sequence is its own reverse at
    4, 16, 64 and 256."""
    others = ORDERS[order](torch.arange(n))
    for loss in (
        lambda y: (own(y) * own(y)[others]).sum(),
        lambda y: F.relu(own(y) - own(y)[others]).sum(),
    ):
        with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
            loss(wrapped(network(3))(torch.randn(n, D))).backward()
