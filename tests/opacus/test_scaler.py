"""torch.amp.GradScaler: refused by name where gradients are clipped before it unscales them."""

import copy

import pytest
import torch
from opacus_cases import opacus_example, private

from dpfast.errors import StateError
from dpfast.opacus import DPOptimizerFast


def scaled_backward(mode, scaler):
    _, module, optimizer, criterion, _ = private(mode, sigma=0.0, poisson_sampling=False)
    _, x, y = opacus_example("mlp")
    optimizer.zero_grad()
    scaler.scale(criterion(module(x), y)).backward()
    return module, optimizer


@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("cls", [torch.amp.GradScaler, type("Own", (torch.amp.GradScaler,), {})])
def test_refused_before_anything_has_changed(call, cls):
    scaler = cls("cpu", init_scale=0.5)
    module, optimizer = scaled_backward("dpfast", scaler)
    before = [(p.detach().clone(), p.grad.clone()) for p in module.parameters()]
    with pytest.raises(StateError, match="Leave the scaler out"):
        getattr(scaler, call)(optimizer)
    for p, (value, gradient) in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, gradient)


def test_refused_for_plain_sums_too():
    model, x, y = opacus_example("mlp")
    optimizer = DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=6
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.raises(StateError, match="Leave the scaler out"):
        scaler.step(optimizer)


def test_two_passes_refuse_where_the_loss_is_scaled():
    with pytest.raises(StateError, match="Leave the scaler out"):
        scaled_backward("dpfast_two_pass", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass"])
def test_a_disabled_scaler_is_none(mode):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    module, optimizer = scaled_backward(mode, scaler)
    before = copy.deepcopy(list(module.parameters()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_materialized_gradients_are_as_in_opacus():
    """Scaled ones are clipped, and nothing unscales their sum: no sample adds more than C."""
    steps = []
    for mode in (None, "dpfast_materialize"):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        module, optimizer = scaled_backward(mode, scaler)
        scaler.step(optimizer)
        steps.append([p.grad.clone() for p in module.parameters()])
    for theirs, ours in zip(*steps, strict=True):
        torch.testing.assert_close(theirs, ours)


def test_groups_are_the_wrapped_optimizer_s():
    model, _, _ = opacus_example("mlp")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=6)
    assert optimizer.param_groups is sgd.param_groups
    optimizer.param_groups = groups = [{**sgd.param_groups[0], "lr": 0.5}]
    assert sgd.param_groups is groups
