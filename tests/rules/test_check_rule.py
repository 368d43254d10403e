"""check_rule takes right rules, also where samples cancel in the clipped sum, and names what is wrong with others."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast import testing
from dpfast.factors import Dense, OuterProduct
from dpfast.taps import registry
from dpfast.testing import check_rule


class Rescaled(nn.Module):
    """That of docs/writing-a-rule.md. Drawn alike on any device: in bf16, by other draws, more than 5 % is rounding."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.randn(4, 3, device="cpu").to(self.scale.device))

    def forward(self, x):
        return self.scale * (x @ self.weight.T)


class Sums(Dense):
    """Gradients whose sums alone are wrong, and where no factor of several is 0: the look at a factor has some."""

    def __init__(self, values, wrong):
        super().__init__(values)
        self.wrong = wrong

    def weighted_sum(self, coefficients):
        right = super().weighted_sum(coefficients)
        if len(coefficients) < 2 or (coefficients == 0).any():
            return right
        return self.wrong(right, coefficients, self.values)


SUMS = {
    "5 % off": lambda right, c, g: 1.05 * right,
    "another sign": lambda right, c, g: -right,
    "a sample is missing": lambda right, c, g: torch.einsum("n,n...->...", c[1:].to(g.dtype), g[1:]),
    "a sample has another sign": lambda right, c, g: right - 2.0 * c[0].to(g.dtype) * g[0],
    "a sample twice": lambda right, c, g: right + c[0].to(g.dtype) * g[0],
}
GRADIENTS = {
    "5 % off": lambda g: 1.05 * g,
    "another sign": lambda g: -g,
    "a sample is missing": lambda g: torch.cat([0.0 * g[:1], g[1:]]),
    "a sample has another sign": lambda g: torch.cat([-g[:1], g[1:]]),
}


@pytest.fixture
def rescaled():
    """Registers the rule with other gradients of ``scale``."""

    def register(scale=Dense):
        @dpfast.register_rule(Rescaled)
        def rule(layer, activations, backprops):
            (x,) = activations
            gradients = (backprops * (x @ layer.weight.T)).sum(1)
            return {layer.weight: OuterProduct(x, backprops * layer.scale), layer.scale: scale(gradients)}

    yield register
    registry.RULES.pop(Rescaled)


@pytest.mark.parametrize(
    ("make", "shape", "seed"),
    [
        (Rescaled, (5, 7, 3), 39),
        (lambda: nn.LayerNorm(6), (5, 7, 6), 38),
        (lambda: nn.GroupNorm(2, 4), (5, 4, 9), 34),
        (lambda: nn.Linear(3, 1), (5, 3), 40),
    ],
    ids=["Rescaled", "LayerNorm", "GroupNorm", "Linear"],
)
def test_samples_that_cancel_in_a_clipped_sum(make, shape, seed, rescaled):
    """Their roundings in bf16 do not: an error of the sum was compared with what is left of the sum."""
    rescaled()
    torch.manual_seed(seed)
    layer, x = make(), torch.randn(shape)
    check_rule(layer, x, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", SUMS)
def test_sums_that_are_wrong(what, dtype, rescaled):
    rescaled(lambda values: Sums(values, SUMS[what]))
    torch.manual_seed(0)
    layer = Rescaled()
    x = torch.randn(5, 7, 3, device="cpu").to(layer.scale.device)
    with pytest.raises(AssertionError, match="clipped sum of scale"):
        check_rule(layer, x, dtypes=[dtype])


class InTf32(nn.Module):
    """As a GPU may take what comes in fp32."""

    def forward(self, x):
        return (x.view(torch.int32) & -0x2000).view(torch.float32) if x.dtype is torch.float32 else x


@pytest.mark.on_cpu
def test_what_torch_rounds_in_fp32_is_allowed_on_a_gpu(monkeypatch, rescaled):
    torch.manual_seed(0)
    layers, x = nn.Sequential(InTf32(), Rescaled()), torch.randn(5, 7, 3)
    rescaled()
    with pytest.raises(AssertionError, match=r"relative error .* is above 1e-05"):
        check_rule(layers, x)
    monkeypatch.setattr(testing, "_rounds_itself", lambda parameter: parameter.dtype is not torch.float64)
    check_rule(layers, x)
    rescaled(lambda values: Dense(1.05 * values))
    with pytest.raises(AssertionError, match=r"grad_sample of 1\.scale"):
        check_rule(layers, x)


@pytest.mark.parametrize("seed", [0, 39])
@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_that_are_wrong(what, seed, rescaled):
    rescaled(lambda values: Dense(GRADIENTS[what](values)))
    torch.manual_seed(seed)
    with pytest.raises(AssertionError, match="grad_sample of scale"):
        check_rule(Rescaled(), torch.randn(5, 7, 3))


class WithState(nn.Module):
    """Takes states as cuDNN does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, states):
        assert states.is_contiguous(), "rnn: hx is not contiguous"
        return self.linear(x + states.sum(0))


def test_states_that_have_samples_second():
    check_rule(WithState(), torch.randn(7, 5, 3), torch.randn(4, 5, 3), batch_dim=1)
