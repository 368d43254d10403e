"""What a layer with layers inside makes of its own parameters and gives beside its outputs: no silent zero."""

import types

import pytest
import torch
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import DpfastError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

N, D, P, C = 5, 6, 3, 0.2
MODES = [GradSampleModule, GradSampleModuleFastGradientClipping]
KEPT = []


class Policy(nn.Module):
    """Actions' distribution, and a value: ``gives`` says in what form."""

    def __init__(self, gives):
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.value, self.log_std = nn.Linear(D, P), nn.Linear(D, 1), nn.Parameter(torch.zeros(P))
        self.gives = gives

    def forward(self, x):
        return self.gives(self, self.mean(x), self.log_std.exp()), self.value(x)


def in_an_attribute(model, mean, std):
    model.std = std
    return mean


def in_a_list(model, mean, std):
    model.kept = [std]
    return mean


def in_a_global(model, mean, std):
    KEPT[:] = [std]
    return mean


def from_a_closure(model, mean, std):
    return lambda: (mean, std)


ASIDE = {
    "a distribution": lambda model, mean, std: torch.distributions.Normal(mean, std),
    "a namespace": lambda model, mean, std: types.SimpleNamespace(mean=mean, std=std),
    "a set": lambda model, mean, std: (mean, frozenset([std])),
    "a function": from_a_closure,
    "an attribute": in_an_attribute,
    "a list in an attribute": in_a_list,
}


@pytest.mark.parametrize("gives", ASIDE.values(), ids=ASIDE.keys())
@pytest.mark.parametrize("mode", MODES)
def test_it_is_refused_with_the_layer(mode, gives):
    """The parameter's gradient was zero, and norms left it out."""
    for model in (Policy(gives), nn.Sequential(nn.Linear(D, D), Policy(gives))):
        with pytest.raises(UnsupportedModuleError, match=r"Policy.* makes of its own parameters beside its outputs"):
            mode(model)(torch.randn(N, D))


def test_a_global_is_seen_too():
    class Global(Policy):
        def forward(self, x):
            KEPT[:] = [self.log_std.exp()]
            return self.mean(x), self.value(x)

    try:
        with pytest.raises(UnsupportedModuleError, match="beside its outputs, in KEPT"):
            GradSampleModule(Global(None))(torch.randn(N, D))
    finally:
        KEPT.clear()


def test_a_graph_refuses_it_too():
    def losses(model, x):
        actions, value = model(x)
        return actions.log_prob(torch.ones_like(actions.mean)).sum(1) + value.flatten()

    step = compile_step(Policy(ASIDE["a distribution"]), losses, max_grad_norm=C, batch_size=N, backend="eager")
    with pytest.raises(DpfastError):
        step(torch.randn(N, D))


def loss_of(given):
    mean, std, value = given
    normal = torch.distributions.Normal(mean, std)
    return (value.flatten() - normal.log_prob(torch.ones_like(mean)).sum(1)).sum()


class OfTensors(Policy):
    """As its error advises."""

    def __init__(self):
        super().__init__(None)

    def forward(self, x):
        mean = self.mean(x)
        return mean, self.log_std.exp().expand_as(mean), self.value(x)


class KeepsMore(OfTensors):
    """What is kept has no gradient, or goes nowhere."""

    def forward(self, x):
        with torch.no_grad():
            self.std = self.log_std.exp()
        self.detached, self.shape, self.seen = self.log_std.exp().detach(), x.shape, {"rows": [x]}
        return super().forward(x)


@pytest.mark.parametrize("kind", [OfTensors, KeepsMore])
def test_tensors_are_right(kind):
    model, x = kind(), torch.randn(N, D)
    exact = loop_over_samples(model, lambda m, x: loss_of(m(x)), x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    for _ in range(2):
        wrapped.zero_grad()
        loss_of(wrapped(x)).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name


def test_what_nobody_trains_may_be_anywhere():
    model = Policy(ASIDE["a distribution"])
    model.log_std.requires_grad_(False)
    x = torch.randn(N, D)
    exact = loop_over_samples(model, lambda m, x: loss_of((m(x)[0].mean, m(x)[0].stddev, m(x)[1])), x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    actions, value = wrapped(x)
    loss_of((actions.mean, actions.stddev, value)).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_what_samples_have_met_within_is_right_anywhere():
    """The operation in which they meet has a tap of its own."""
    model, x = Policy(lambda model, mean, std: types.SimpleNamespace(scaled=mean * std)), torch.randn(N, D)

    def loss(model, x):
        given, value = model(x)
        return (torch.sin(3.0 * given.scaled).sum(1) * value.flatten()).sum()

    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
