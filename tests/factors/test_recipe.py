"""What shapes tell of layers alike is what their rule would say."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast.arithmetic import finished
from dpfast.factors import Alike, Dense, OuterProduct, Recipe, row_sum, weighted_sums
from dpfast.modes import deferred

N, LAYERS = 3, 2


def answer(a, b, swapped, bias):
    product = OuterProduct(b, a) if swapped else OuterProduct(a, b)
    return [product, row_sum(b)] if bias else [product]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("t, d, p", [(5, 20, 30), (300, 8, 24), (5, 3, 2)])  # inputs are kept; gradients are
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gives_the_bits_of_the_rules_answer(dtype, t, d, p, swapped, bias):
    seen = torch.randn(N, t, d).to(dtype), torch.randn(N, t, p).to(dtype)
    recipe = Recipe.learned(answer(*seen, swapped, bias), *seen)
    a, b = torch.randn(LAYERS * N, t, d).to(dtype), torch.randn(LAYERS * N, t, p).to(dtype)
    made = recipe.made(a, b, LAYERS)
    coefficients = torch.rand(N)
    for one, factor in zip(made, answer(a, b, swapped, bias), strict=True):
        other = Alike(factor, LAYERS)
        for x, y in zip(finished(one.norm), finished(other.norm), strict=True):
            assert torch.equal(x, y)
        for x, y in zip(one.weighted_sums(coefficients), other.weighted_sums(coefficients), strict=True):
            assert torch.equal(x, y)


def test_what_is_kept_beyond_changes_no_norm():
    a, b = torch.randn(LAYERS * N, 5, 20), torch.randn(LAYERS * N, 5, 30)
    recipe, size = Recipe.learned(answer(a, b, False, True), a, b), LAYERS * N * 20 * 30 * 4
    coefficients = torch.rand(N)
    without, within = recipe.made(a, b, LAYERS, room=size - 1)[0], recipe.made(a, b, LAYERS, room=size)[0]
    assert isinstance(without.factor, OuterProduct) and isinstance(within.factor, Dense)
    assert (without.beyond, within.beyond) == (0, size)
    for one, other in zip(finished(within.norm), finished(without.norm), strict=True):
        assert torch.equal(one, other)
    sums = zip(within.weighted_sums(coefficients), without.weighted_sums(coefficients), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in sums)


def test_is_learned_of_the_very_tensors_alone():
    a, b = torch.randn(N, 5, 20), torch.randn(N, 5, 30)
    assert Recipe.learned(answer(a, b, False, True), a, b) is not None
    assert Recipe.learned([OuterProduct(a.clone(), b)], a, b) is None
    assert Recipe.learned([OuterProduct(a, b), row_sum(2.0 * b)], a, b) is None
    assert Recipe.learned(answer(a[:, :1], b[:, :1], False, True), a[:, :1], b[:, :1]) is None
    long = torch.randn(N, 40, 256), torch.randn(N, 40, 256)  # by the Gram way
    assert Recipe.learned([OuterProduct(*long)], *long) is None


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def step(net, x):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=1e6)
    wrapped(x).square().flatten(1).sum(1).mean().backward()
    return wrapped


def test_a_rule_of_somebodys_own_is_asked_each_time():
    """It may look at values."""

    class Sparse(nn.Linear):
        pass

    asked = []

    def rule(layer, activations, backprops):
        asked.append(len(backprops))
        return {layer.weight: OuterProduct(activations[0], backprops), layer.bias: row_sum(backprops)}

    dpfast.register_rule(Sparse, fresh=True, alike=lambda layer: ())(rule)
    try:
        wrapped = step(nn.Sequential(Sparse(16, 16), nn.Tanh(), Sparse(16, 16)), torch.randn(N, 5, 16))
        wrapped(torch.randn(N, 5, 16)).square().flatten(1).sum(1).mean().backward()
    finally:
        dpfast.taps.registry.RULES.pop(Sparse)
    assert asked == [2 * N, 2 * N]


def test_a_switch_of_precision_is_seen(monkeypatch):
    monkeypatch.setattr(deferred, "_kinds", {})
    x = torch.randn(N, 5, 16)
    before = torch.get_float32_matmul_precision()
    exact = step(model(), x).norm_slack
    try:
        torch.set_float32_matmul_precision("medium")
        reduced = step(model(), x).norm_slack
    finally:
        torch.set_float32_matmul_precision(before)
    assert (reduced > 10 * exact).all()
    assert [len(kind.recipes) for kind in deferred._kinds.values()] == [2]
    assert torch.equal(step(model(), x).norm_slack, exact)


@pytest.mark.parametrize("dropped", [False, True])
def test_small_sums_by_one_product(dropped):
    coefficients = torch.rand(N)
    biases = [Alike(row_sum(torch.randn(layers * N, 5, p)), layers) for layers, p in ((1, 7), (2, 5), (3, 7))]
    large = Alike(OuterProduct(torch.randn(N, 5, 20), torch.randn(N, 5, 30)), 1)
    if dropped:
        coefficients[1] = 0.0
        for alike in biases:
            alike.factor.values.view(alike.layers, N, -1)[:, 1] = torch.inf
    found = weighted_sums([biases[0], large, *biases[1:]], coefficients)
    assert [len(some) for some in found] == [1, 1, 2, 3]
    for some, alike in zip([found[0], *found[2:]], biases, strict=True):
        for one, other in zip(some, alike.weighted_sums(coefficients), strict=True):
            assert one.shape == other.shape and torch.allclose(one, other)
