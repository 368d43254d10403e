"""Hooks on a plain model: what they leave, and that they come off."""

import copy
import pickle

import pytest
import torch
from cases import MODELS, example, mean_loss, sum_loss
from torch import nn

import dpfast
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.modes import autograd_grad_sample
from dpfast.testing import loop_over_samples, relative_error


@pytest.fixture(autouse=True)
def _hooks_enabled():
    yield
    autograd_grad_sample.enable_hooks()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("reduction", "loss"), [("mean", mean_loss), ("sum", sum_loss)])
def test_equals_loop_over_samples(name, reduction, loss):
    model, x, y = example(name)
    exact = loop_over_samples(model, sum_loss, x, y)
    state, attributes = copy.deepcopy(model.state_dict()), set(model.__dict__)
    autograd_grad_sample.add_hooks(model, loss_reduction=reduction)
    loss(model, x, y).backward()
    for key, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[key]) <= 1e-5, key
        assert p.grad is not None
    assert list(model.state_dict()) == list(state)
    autograd_grad_sample.remove_hooks(model)
    assert set(model.__dict__) == attributes
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_samples_in_the_second_dimension():
    layer, x = nn.Linear(3, 2), torch.randn(5, 4, 3)
    autograd_grad_sample.add_hooks(layer, "sum", batch_first=False)
    layer(x).sum().backward()
    assert layer.weight.grad_sample.shape == (4, 2, 3)


def test_disabled_in_the_whole_process():
    model, x, y = example("mlp")
    other = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=0.1)
    autograd_grad_sample.add_hooks(model)
    plain = copy.deepcopy(model)
    autograd_grad_sample.remove_hooks(plain)
    mean_loss(plain, x, y).backward()
    loss = mean_loss(model, x, y)  # the graph has been made with hooks
    autograd_grad_sample.disable_hooks()
    loss.backward()
    assert model[0].weight.grad_sample is None
    mean_loss(other, x, y).backward()
    for p, q, r in zip(model.parameters(), plain.parameters(), other.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-6 and relative_error(r.grad, q.grad) <= 1e-6
    autograd_grad_sample.enable_hooks()
    mean_loss(model, x, y).backward()
    assert model[0].weight.grad_sample.shape[0] == len(y)


def test_copies_have_hooks_of_their_own():
    model, x, y = example("mlp")
    autograd_grad_sample.add_hooks(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mean_loss(other, x, y).backward()
        assert other[0].weight.grad_sample is not None and model[0].weight.grad_sample is None
        autograd_grad_sample.remove_hooks(other)
        with pytest.raises(StateError):
            autograd_grad_sample.remove_hooks(other)
    mean_loss(model, x, y).backward()
    assert model[0].weight.grad_sample is not None


class BatchMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(0, keepdim=True))


class TimeFirst(nn.Module):
    """With positions that all samples share, which are made within it."""

    def __init__(self):
        super().__init__()
        self.first, self.table, self.last = nn.Linear(6, 5), nn.Embedding(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.first(x) + self.table(torch.arange(x.shape[1]))
        return self.last(hidden.transpose(0, 1)).transpose(0, 1).mean(1)


def hooked(model):
    autograd_grad_sample.add_hooks(model)
    return model


def referring_to_its_wrapper(model):
    model.__dict__["trainer"] = [dpfast.GradSampleModule(model)]
    return model


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("wrapped", [hooked, referring_to_its_wrapper])
def test_the_model_is_looked_at(wrapped):
    """A copy of it, which has a copy of what wraps it: that is not on trust."""
    with pytest.raises(UnsupportedModuleError, match="last"):
        wrapped(BatchMean())(torch.randn(4, 6)).square().sum().backward()
    for n in (4, 3):
        torch.manual_seed(0)
        model, x, y = TimeFirst(), torch.randn(n, 4, 6), torch.randint(2, (n,))
        exact = loop_over_samples(model, sum_loss, x, y)
        mean_loss(wrapped(model), x, y).backward()
        for name, expected in exact.items():
            assert relative_error(model.get_parameter(name).grad_sample, expected) <= 1e-5, name


def test_bad_input():
    model, _, _ = example("mlp")
    with pytest.raises(ValueError, match="no hooks found"):
        autograd_grad_sample.remove_hooks(model)
    with pytest.raises(ValueError, match="'max'"):
        autograd_grad_sample.add_hooks(model, loss_reduction="max")
    with pytest.raises(NotImplementedError, match="over the batch"):
        autograd_grad_sample.add_hooks(nn.BatchNorm1d(3))
    autograd_grad_sample.add_hooks(model)
    for again in (lambda: autograd_grad_sample.add_hooks(model), lambda: dpfast.GradSampleModule(model)):
        with pytest.raises(StateError, match="hooks twice"):
            again()
    assert autograd_grad_sample.is_supported(nn.Linear(2, 2))
    assert not autograd_grad_sample.is_supported(nn.BatchNorm1d(3))
