"""The criterion of two passes: one loss a sample, whatever the shape and the arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_gradients, clipped_as_told
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from opacus_cases import loader
from torch import nn

from dpfast.errors import InputError
from dpfast.opacus import ClippedLossTensor, PrivacyEngine
from dpfast.testing import loop_over_samples

C = 0.5
NEW = hasattr(DPTensorFastGradientClipping, "__mul__")  # Opacus 1.6's arithmetic

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG")


def private(model, criterion, reduction="mean"):
    module, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=loader("mlp"),
        noise_multiplier=0.0,
        max_grad_norm=C,
        criterion=criterion,
        loss_reduction=reduction,
        grad_sample_mode="dpfast_two_pass",
    )
    return module, optimizer, criterion


def clipped(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_one_column(reduction):
    """(N, 1): Opacus's broadcasts to (N, N) and lets one sample's factor scale the others. Here it is an error."""
    model, x, y = nn.Linear(4, 1), torch.randn(6, 4) * 10, torch.randn(6, 1)
    exact = loop_over_samples(model, lambda m, x, y: (m(x) - y).square().sum(), x, y)
    module, _, criterion = private(model, nn.MSELoss(reduction=reduction), reduction)
    with pytest.raises(InputError, match=r"\(6, 1\) is not one loss a sample.*squeeze"):
        criterion(module(x), y)
    loss = criterion(module(x).squeeze(1), y.squeeze(1))
    assert isinstance(loss, ClippedLossTensor) and loss.loss_per_sample.shape == (6,)
    loss.backward()
    assert_gradients(clipped(model), clipped_as_told(module.get_clipping_coef(), exact, C))
    assert module.hooks_enabled


def test_losses_of_several_targets_a_sample():
    model, x, y = nn.Linear(4, 3), torch.randn(6, 5, 4), torch.randint(0, 3, (6, 5))
    y[0, 3:] = -100

    def per_sample(m, x, y):
        losses = F.cross_entropy(m(x).transpose(1, 2), y, reduction="none", ignore_index=-100)
        return (losses.sum(1) / (y != -100).sum(1)).sum()

    exact = loop_over_samples(model, per_sample, x, y)
    module, _, criterion = private(model, nn.CrossEntropyLoss())
    with pytest.raises(InputError, match=r"30 losses|not one loss a sample|30\b"):
        criterion(module(x).flatten(0, 1), y.flatten()).backward()
    module.zero_grad()
    out = module(x)
    criterion(out.flatten(0, 1), y.flatten(), shape=out.shape).backward()
    if NEW:  # 1.5.4 divides by T, ignored targets or not
        assert_gradients(clipped(model), clipped_as_told(module.get_clipping_coef(), exact, C))


def test_more_than_one_loss_a_sample():
    model = nn.Linear(4, 3)
    module, _, criterion = private(model, nn.MSELoss())
    with pytest.raises(InputError, match=r"\(6, 3\) is not one loss a sample"):
        criterion(module(torch.randn(6, 4)), torch.randn(6, 3))


@pytest.mark.skipif(not NEW, reason="Opacus 1.5.4's loss has no arithmetic")
def test_arithmetic_stays_one_loss_a_sample():
    model, x, y = nn.Linear(4, 1), torch.randn(6, 4), torch.randn(6, 1)
    weights = torch.rand(6)

    def weighted(m, x, y, w):
        difference = (m(x) - y).squeeze(1)
        return (difference.square() * w / 2 + difference.abs()).sum()

    exact = loop_over_samples(model, weighted, x, y, weights)
    module, _, criterion = private(model, nn.MSELoss())
    squared = criterion(module(x).squeeze(1), y.squeeze(1))
    criterion.criterion = nn.L1Loss()
    loss = squared * weights / 2 + criterion(module(x).squeeze(1), y.squeeze(1)) + 0.0
    assert isinstance(loss, ClippedLossTensor)
    assert isinstance(-(1 - loss) - loss, ClippedLossTensor)
    with pytest.raises(InputError, match=r"\(6, 6\)"):
        squared * torch.ones(6, 6)
    loss.backward()
    assert_gradients(clipped(model), clipped_as_told(module.get_clipping_coef(), exact, C))


def test_an_empty_batch():
    model = nn.Linear(4, 1)
    module, optimizer, criterion = private(model, nn.MSELoss())
    criterion(module(torch.empty(0, 4)).squeeze(1), torch.empty(0)).backward()
    optimizer.step()
    assert (model.weight.grad == 0).all()
