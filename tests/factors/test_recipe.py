"""What shapes tell of layers alike is what their rule would say."""

import copy

import pytest
import torch
from torch import nn

import dpfast
from dpfast.arithmetic import SumError, finished
from dpfast.factors import Alike, Dense, Lookup, OuterProduct, Recipe, row_sum
from dpfast.modes import deferred
from dpfast.taps import Activations, find_rule

pytestmark = pytest.mark.usefixtures("reference_runs")  # kernels have no recipes

N, LAYERS = 3, 2


def answer(a, b, swapped, bias):
    product = OuterProduct(b, a) if swapped else OuterProduct(a, b)
    return [product, row_sum(b)] if bias else [product]


def check_same_bits(recipe, factors, a, b, room=0):
    """Of recipe's answer and :class:`Alike`'s."""
    numbers, left = recipe.numbers(a, b, room)
    made = recipe.alikes(numbers, LAYERS)
    coefficients = torch.rand(N)
    for one, seen, factor in zip(made, numbers, factors, strict=True):
        other = Alike(factor, LAYERS)
        assert torch.equal(seen.norm, other.numbers().norm)
        check_same_errors(one.norm.error, other.norm.error)
        for x, y in zip(finished(one.norm), finished(other.norm), strict=True):
            assert torch.equal(x, y)
        for x, y in zip(one.weighted_sums(coefficients), other.weighted_sums(coefficients), strict=True):
            assert torch.equal(x, y)
    assert left == room


def check_same_errors(one, other):
    """What norms may lack to underflow is too little for any bit of ordinary data, and stands with its own norms."""
    assert type(one) is type(other)
    if not isinstance(one, SumError):
        return
    assert (one.relative, one.least) == (other.relative, other.least)
    pairs, expected = list(zip(one.lost, one.norms, strict=True)), list(zip(other.lost, other.norms, strict=True))
    for lost, norms in pairs:
        found = [i for i, (x, y) in enumerate(expected) if x == lost and torch.equal(y, norms)]
        assert found, f"of {lost}, norms {tuple(norms.shape)}"
        del expected[found[0]]
    assert not expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "t, d, p", [(5, 20, 30), (300, 8, 24), (5, 3, 2), (1, 20, 30)]
)  # the second's gradients are kept
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gives_the_bits_of_the_rules_answer(dtype, t, d, p, swapped, bias):
    seen = torch.randn(N, t, d).to(dtype), torch.randn(N, t, p).to(dtype)
    recipe = Recipe.learned(answer(*seen, swapped, bias), *seen)
    a, b = torch.randn(LAYERS * N, t, d).to(dtype), torch.randn(LAYERS * N, t, p).to(dtype)
    check_same_bits(recipe, answer(a, b, swapped, bias), a, b)


def answer_of(layer, a, b):
    """Of its rule, in the order of its parameters."""
    factors = find_rule(layer)(layer, Activations([a]), b)
    return [factors[p] for p in layer.parameters() if p.requires_grad]


@pytest.mark.on_cpu  # where small samples are taken in fp64: other answers of norms have no recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.LayerNorm(20), nn.LayerNorm(20, bias=False), nn.RMSNorm(20, eps=1e-5)])
@pytest.mark.parametrize("frozen", [False, True])
def test_of_normalised_inputs(dtype, layer, frozen):
    layer = copy.deepcopy(layer)
    layer.weight.requires_grad_(not frozen)
    seen, (a, b) = ([(3.0 + torch.randn(n, 5, 20)).to(dtype) for _ in "ab"] for n in (N, LAYERS * N))
    recipe = Recipe.learned(answer_of(layer, *seen), *seen)
    check_same_bits(recipe, answer_of(layer, a, b), a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.Linear(20, 30), nn.LayerNorm(20)])
def test_of_one_position(dtype, layer):
    def seen(n):
        return torch.randn(n, 20).to(dtype), torch.randn(n, *layer.bias.shape).to(dtype)

    first, (a, b) = seen(N), seen(LAYERS * N)
    recipe = Recipe.learned(answer_of(layer, *first), *first)
    if isinstance(layer, nn.LayerNorm) and (dtype is torch.float64 or not a.is_cpu):
        assert recipe is None
    else:
        check_same_bits(recipe, answer_of(layer, a, b), a, b)


@pytest.mark.on_cpu  # as above
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_is_learned_where_a_sample_is_not_finite(poison):
    layer = nn.LayerNorm(20)
    a, b = torch.randn(N, 5, 20), torch.randn(N, 5, 20)
    a[1, 2, 3] = b[2, 0, 1] = poison
    recipe = Recipe.learned(answer_of(layer, a, b), a, b)
    a, b = torch.randn(LAYERS * N, 5, 20), torch.randn(LAYERS * N, 5, 20)
    check_same_bits(recipe, answer_of(layer, a, b), a, b)


@pytest.mark.parametrize("table", [11, 5000])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_of_look_ups(index, table):
    layer, words = nn.Embedding(table, 20), lambda n: torch.randint(0, 11, (n, 15)).to(index)
    seen, a, b = (words(N), torch.randn(N, 15, 20)), words(LAYERS * N), torch.randn(LAYERS * N, 15, 20)
    recipe = Recipe.learned(answer_of(layer, *seen), *seen)
    check_same_bits(recipe, answer_of(layer, a, b), a, b)
    room = LAYERS * N * table * 20 * 4
    kept, left = recipe.numbers(a, b, room=room)
    if table > 11 or not a.is_cpu:  # a GPU brings equal indices together whatever the table
        assert left == room and isinstance(kept[0].factor, Lookup)
        return
    assert left == 0 and torch.equal(kept[0].factor, Lookup(a, b, 11).table())
    coefficients = torch.rand(N)
    one, other = recipe.alikes(kept, LAYERS)[0], Alike(Lookup(a, b, 11), LAYERS)
    for x, y in zip(one.weighted_sums(coefficients), other.weighted_sums(coefficients), strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(finished(one.norm), finished(other.norm), strict=True):
        assert torch.equal(x, y)


def test_is_not_learned_of_padding():
    layer = nn.Embedding(11, 20, padding_idx=3)
    a, b = torch.randint(0, 11, (N, 15)), torch.randn(N, 15, 20)
    assert Recipe.learned(answer_of(layer, a, b), a, b) is None


def test_is_not_learned_of_statistics_in_fp32():
    """Of long samples, and where eps says little, with whose constant rows more has to be done."""
    for layer, t in ((nn.LayerNorm(20), 2**11), (nn.LayerNorm(20, eps=1e-12), 5)):
        a, b = torch.randn(N, t, 20), torch.randn(N, t, 20)
        assert Recipe.learned(answer_of(layer, a, b), a, b) is None


def test_what_is_kept_beyond_changes_no_norm():
    a, b = torch.randn(LAYERS * N, 5, 20), torch.randn(LAYERS * N, 5, 30)
    recipe, size = Recipe.learned(answer(a, b, False, True), a, b), LAYERS * N * 20 * 30 * 4
    coefficients = torch.rand(N)
    (few, all_left), (more, none_left) = recipe.numbers(a, b, room=size - 1), recipe.numbers(a, b, room=size)
    without, within = recipe.alikes(few, LAYERS)[0], recipe.alikes(more, LAYERS)[0]
    assert isinstance(without.factor, OuterProduct) and isinstance(within.factor, Dense)
    assert (all_left, none_left) == (size - 1, 0)
    for one, other in zip(finished(within.norm), finished(without.norm), strict=True):
        assert torch.equal(one, other)
    sums = zip(within.weighted_sums(coefficients), without.weighted_sums(coefficients), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in sums)


def test_is_learned_of_the_very_tensors_alone():
    a, b = torch.randn(N, 5, 20), torch.randn(N, 5, 30)
    assert Recipe.learned(answer(a, b, False, True), a, b) is not None
    assert Recipe.learned([OuterProduct(a.clone(), b)], a, b) is None
    assert Recipe.learned([OuterProduct(a, b), row_sum(2.0 * b)], a, b) is None
    assert Recipe.learned(answer(a[:, :0], b[:, :0], False, True), a[:, :0], b[:, :0]) is None
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


@pytest.mark.parametrize("layers", [1, 3])
def test_sums_drop_what_is_not_finite(layers):
    coefficients, bias = torch.rand(N), row_sum(torch.randn(layers * N, 5, 7))
    coefficients[1] = 0.0
    rows = bias.values.view(layers, N, 7)
    exact = (rows * coefficients.view(-1, 1)).sum(1)
    rows[:, 1] = torch.inf
    for one, other in zip(Alike(bias, layers).weighted_sums(coefficients), exact, strict=True):
        torch.testing.assert_close(one, other)
