"""Clipping under Opacus's own optimizers, losses and batch splitting."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import assert_gradients, example, mean_loss, sum_loss
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfast
from dpfast.testing import clipped_sum, loop_over_samples

C = 0.5


def optimizer_for(model, cls=DPOptimizerFastGradientClipping, expected_batch_size=6, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    return cls(sgd, noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=expected_batch_size, **options)


def stepped(model, before):
    """The gradient that an SGD step with learning rate 1 has applied."""
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def averaged(gradients, n):
    return {name: g / n for name, g in clipped_sum(gradients, C).items()}


@pytest.mark.parametrize("name", ["transformer", "mlp", "tied", "recurrent"])
@pytest.mark.parametrize("way", ["one_pass", "two_pass", "materialize"])
def test_a_step_applies_the_average_clipped_gradient(name, way):
    model, x, y = example(name)
    before = copy.deepcopy(model.state_dict())
    gradients = loop_over_samples(model, sum_loss, x, y)
    if way == "materialize":
        wrapped = dpfast.GradSampleModule(model)
        optimizer = optimizer_for(wrapped, DPOptimizer)
        mean_loss(wrapped, x, y).backward()
    else:
        wrapped = dpfast.GradSampleModuleFastGradientClipping(
            model, max_grad_norm=C, passes=1 if way == "one_pass" else 2
        )
        optimizer = optimizer_for(wrapped)
        if way == "one_pass":
            mean_loss(wrapped, x, y).backward()
        else:
            criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
            criterion(wrapped(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_gradients(stepped(model, before), averaged(gradients, 6), 2e-5)


def test_a_loss_of_another_shape_does_not_break_the_bound():
    """In Opacus a loss of shape [N, 1] is multiplied by factors [N] into [N, N]; here no factor meets the loss."""
    model = nn.Linear(4, 1)
    x, y = torch.randn(6, 4) * 10, torch.randn(6, 1)
    gradients = loop_over_samples(model, lambda m, x, y: F.mse_loss(m(x), y, reduction="sum"), x, y)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    F.mse_loss(wrapped(x), y, reduction="none").mean().backward()
    assert_gradients({n: p.grad for n, p in model.named_parameters()}, clipped_sum(gradients, C))


@pytest.mark.parametrize("left", [True, False])
def test_two_passes_refuse_losses_of_another_shape(left):
    """Opacus's own criterion multiplies factors [N] and losses [N, 1] into [N, N]."""
    model = nn.Linear(4, 1)
    x, y = torch.randn(6, 4) * 10, torch.randn(6, 1)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=2)
    criterion = DPLossFastGradientClipping(wrapped, optimizer_for(wrapped), nn.MSELoss())
    with pytest.raises(dpfast.DpfastError, match=r"\(6,\) and \(6, 1\) would broadcast"):
        criterion(wrapped(x), y).backward()
    losses = F.mse_loss(wrapped(x), y, reduction="none")
    factors = wrapped.get_clipping_coef()
    with pytest.raises(dpfast.DpfastError, match="squeeze"):
        factors * losses if left else losses * factors
    products = (factors * losses.squeeze(1), 2.0 * factors, factors * torch.tensor(2.0), factors[torch.tensor([0])])
    assert all(type(product) is torch.Tensor for product in products)


def test_physical_batches_smaller_than_the_logical_one():
    model, x, y = example("mlp", 12)
    before = copy.deepcopy(model.state_dict())
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    optimizer = optimizer_for(wrapped, expected_batch_size=12)
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    sizes = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as parts:
        for part_x, part_y in parts:
            sizes.append(len(part_y))
            mean_loss(wrapped, part_x, part_y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(sizes) == 3
    assert_gradients(stepped(model, before), averaged(gradients, 12), 2e-5)


def test_skipped_steps_add_up():
    model, x, y = example("mlp", 6)
    before = copy.deepcopy(model.state_dict())
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    optimizer = optimizer_for(wrapped)
    for part, skip in ((slice(0, 4), True), (slice(4, 6), False)):
        optimizer.signal_skip_step(skip)
        mean_loss(wrapped, x[part], y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_gradients(stepped(model, before), averaged(gradients, 6), 2e-5)


def test_an_empty_poisson_batch_is_a_step_of_noise():
    model, x, y = example("mlp", 6)
    before = copy.deepcopy(model.state_dict())
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    optimizer = optimizer_for(wrapped, generator=torch.Generator().manual_seed(0))
    optimizer.noise_multiplier = 1.0
    mean_loss(wrapped, x[:0], y[:0]).backward()
    optimizer.step()
    step = torch.cat([g.flatten() for g in stepped(model, before).values()])
    assert torch.isfinite(step).all()
    assert 0.8 < step.std() / (C / 6) < 1.2
