"""What rules of others answer: errors below 0, no factors, exceptions; and each says whose rule it was."""

import sys

import pytest
import torch
from cases import clipped_as_told
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhostModule
from torch import nn

import dpfast
import dpfast.opacus
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.factors import Dense, OuterProduct
from dpfast.taps import registry
from dpfast.testing import loop_over_samples, norms_of, relative_error

C = 1.0


class Own(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.fixture
def model():
    """Gives a model of one such layer, whose rule is what its argument says."""

    def make(rule):
        dpfast.register_rule(Own)(rule)
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), Own(3, 4))

    yield make
    for table in (registry.RULES, registry.GRAD_SAMPLERS, registry.NORM_SAMPLERS):
        table.pop(Own)


def with_error(error):
    """A right rule that says how far its bias's gradients may be off: ``error(b)`` of these."""

    def rule(layer, activations, backprops):
        bias = backprops.sum(1)
        return {layer.weight: OuterProduct(activations[0], backprops), layer.bias: Dense(bias, error=error(bias))}

    return rule


def backward(model, mode, x):
    if mode == "compiled":
        step = dpfast.compile_step(model, lambda m, x: loss(m(x)), max_grad_norm=C, batch_size=len(x), backend="eager")
        step(x)
        factors = step.clip_factors
    else:
        wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
        loss(wrapped(x)).sum().backward()
        factors = wrapped.get_clipping_coef()
    return {name: p.grad for name, p in model.named_parameters()}, factors


def loss(outputs):
    return 30.0 * outputs.square().sum((1, 2))


BELOW_ZERO = {
    "a tensor": lambda b: -0.999 * b.double().norm(dim=1),
    "what gives one": lambda b: lambda: -0.999 * b.double().norm(dim=1),
    "fp32": lambda b: -0.999 * b.norm(dim=1),
}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("error", BELOW_ZERO)
def test_errors_below_zero(error, n, mode, model):
    """They lowered the bound, and a sample added 135 C."""
    net, x = model(with_error(BELOW_ZERO[error])), torch.randn(n, 7, 5)
    exact = loop_over_samples(net, lambda m, x: loss(m(x)).sum(), x)
    assert (norms_of(exact) > 2.0 * C).all()
    grads, factors = backward(net, mode, x)
    for name, expected in clipped_as_told(factors, exact, C).items():
        assert relative_error(grads[name], expected) <= 1e-5, name


class OnATable(nn.Module):
    """Its layer's input has no samples."""

    def __init__(self):
        super().__init__()
        self.own = Own(3, 4)
        self.register_buffer("table", torch.randn(7, 3))

    def forward(self, x):
        return x + self.own(self.table)


@pytest.mark.parametrize("error", BELOW_ZERO)
def test_errors_below_zero_of_a_layer_on_a_table(error, model):
    model(with_error(BELOW_ZERO[error]))
    net, x = OnATable(), torch.randn(2, 7, 4)
    exact = loop_over_samples(net, lambda m, x: loss(m(x)).sum(), x)
    grads, factors = backward(net, "eager", x)
    for name, expected in clipped_as_told(factors, exact, C).items():
        assert relative_error(grads[name], expected) <= 1e-5, name


@pytest.mark.parametrize("error", BELOW_ZERO)
def test_errors_below_zero_through_opacus(error, model):
    net, x = model(with_error(BELOW_ZERO[error]))[1], torch.randn(4, 7, 3)
    norms = norms_of(loop_over_samples(net, lambda m, x: loss(m(x)).sum(), x))
    dpfast.opacus.install()
    try:
        wrapped = OpacusGhostModule(net, max_grad_norm=C, loss_reduction="sum")
        loss(wrapped(x)).sum().backward()
        assert (wrapped.get_norm_sample() >= norms * (1.0 - 1e-6)).all()
    finally:
        dpfast.opacus.uninstall()


def test_errors_that_are_none_stay_as_they_are(model):
    """0, more than 0, NaN (the sample is dropped), and (N, 1)."""
    for error, dropped in ((0.0, False), (0.5, False), (torch.nan, True)):
        net, x = (
            model(with_error(lambda b, e=error: torch.full((len(b), 1), e, dtype=torch.float64))),
            torch.ones(2, 7, 5),
        )
        grads, _ = backward(net, "eager", x)
        size = torch.cat([g.flatten() for g in grads.values()]).norm()
        assert (size == 0.0) == dropped and size <= 2.0 * C


@pytest.mark.parametrize("error", [0.01, torch.tensor(0.01), torch.zeros(3), "little"])
def test_errors_that_are_no_tensor_of_samples(error, model):
    net = model(with_error(lambda b: error))
    with pytest.raises(InputError, match=r"1 \(Own\): the error of Dense is .*, and not a tensor \(2,\)"):
        backward(net, "eager", torch.randn(2, 7, 5))


NO_ANSWERS = {
    "gives None,": lambda layer, a, b: None,
    "gives a tuple,": lambda layer, a, b: (OuterProduct(a[0], b), Dense(b.sum(1))),
    r"gives a Tensor for its parameter \(4,\), .*Dense\(values\)": lambda layer, a, b: {
        layer.weight: OuterProduct(a[0], b),
        layer.bias: b.sum(1),
    },
    r"gives None for its parameter \(4,\)": lambda layer, a, b: {layer.weight: OuterProduct(a[0], b), layer.bias: None},
}


@pytest.mark.parametrize("says", NO_ANSWERS)
def test_answers_that_are_none(says, model):
    net = model(NO_ANSWERS[says])
    with pytest.raises(UnsupportedModuleError, match=rf"^1 \(Own\): the rule of Own {says}"):
        backward(net, "eager", torch.randn(2, 7, 5))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_whose_rule_raised(model):
    def rule(layer, activations, backprops):
        return {}["x"]

    net = model(rule)
    with pytest.raises(KeyError, match="x") as raised:
        backward(net, "eager", torch.randn(2, 7, 5))
    assert raised.value.__notes__ == ["dpfast: raised by the rule of 1 (Own)"]
