"""A step like the one before is finished by what is known from it, to the same bits; any difference is seen."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import dpfast
from dpfast.arithmetic import SquaredNorm, ops
from dpfast.errors import DpfastWarning, StateError
from dpfast.factors.alike import sums_of_all_inputs, sums_of_inputs
from dpfast.factors.outer_product import OuterProduct
from dpfast.modes import before, deferred
from dpfast.modes.accumulation import held_by, note_zeros
from dpfast.modes.clipped import clip, clip_to
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.on_cpu

N, T, D, WORDS, C = 4, 6, 8, 11, 0.05


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 40), nn.Linear(40, D)) for _ in range(3)
        )
        self.unused, self.head = nn.Linear(D, D), nn.Linear(D, 5, bias=False)

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(T).repeat(len(words), 1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def losses(model, words):
    return model(words).square().flatten(1).sum(1)


def wrap(**options):
    torch.manual_seed(0)
    return dpfast.GradSampleModuleFastGradientClipping(Model(), max_grad_norm=C, **options)


def batch(n=N, seed=0):
    return torch.randint(0, WORDS, (n, T), generator=torch.Generator().manual_seed(seed))


def step(wrapped, words):
    losses(wrapped, words).mean().backward()
    return [p.grad.clone() for p in wrapped.parameters()], wrapped._norms, wrapped._clip_factors


@pytest.fixture
def as_before(monkeypatch):
    """How many steps were finished as the one before."""
    found, total = [], before.Remembered.total_sq_norm

    def watched(self, numbers):
        found.append(len(numbers))
        return total(self, numbers)

    monkeypatch.setattr(before.Remembered, "total_sq_norm", watched)
    monkeypatch.setattr(deferred, "_kinds", {})
    return found


def same(one, other):
    for x, y in zip((*one[0], *one[1], one[2]), (*other[0], *other[1], other[2]), strict=True):
        assert torch.equal(x, y)


@pytest.fixture(params=["as they are", "of other bits"])
def routines(request, monkeypatch):
    """Of products of one row: on some CPUs, MKL's bits depend on whether a matrix or a batch of one is multiplied."""
    if request.param == "as they are":
        return
    mv, bmm = torch.mv, torch.bmm
    monkeypatch.setattr(torch, "mv", lambda x, y: mv(x, y) * (1.0 + 2.0**-20))
    monkeypatch.setattr(torch, "bmm", lambda x, y: bmm(x, y) * (1.0 + 2.0 ** -(17 + min(2, len(x)))))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gives_the_bits_of_the_long_way(reduction, as_before, routines, monkeypatch):
    wrapped, found = wrap(loss_reduction=reduction), []
    for seed in range(4):
        wrapped.zero_grad()
        found.append(step(wrapped, batch(seed=seed)))
    assert len(as_before) == 3  # all but the first
    monkeypatch.setattr(before.Before, "learned", lambda *_: None)
    other = wrap(loss_reduction=reduction)
    for seed in range(4):
        other.zero_grad()
        same(step(other, batch(seed=seed)), found[seed])
    assert len(as_before) == 3


def test_as_a_loop_over_samples(as_before):
    wrapped = wrap()
    for seed in range(4):
        wrapped.zero_grad()
        step(wrapped, batch(seed=seed))
    plain = copy.deepcopy(wrapped).to_standard_module()
    exact = loop_over_samples(plain, lambda m, x: losses(m, x).sum(), batch(seed=3))
    assert as_before
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(wrapped._module.get_parameter(name).grad, total) <= 1e-4, name
    assert (wrapped.norm_slack >= 0).all() and (wrapped.norm_slack <= 1e-3).all()


def change_size(wrapped):
    return batch(3)


def freeze(wrapped):
    wrapped._module.blocks[1][1].weight.requires_grad_(False)
    wrapped._module.blocks[1][1].weight.grad = None
    return batch()


def replace(wrapped):
    layer = wrapped._module.blocks[2][1]
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    return batch()


def narrow(wrapped):
    wrapped._module.blocks[0][0].eps = 0.1
    return batch()


@pytest.mark.parametrize("change", [change_size, freeze, replace, narrow])
def test_what_is_other_than_before_is_seen(change, as_before, monkeypatch):
    one, other = wrap(), wrap()
    for wrapped in (one, other):
        for _ in range(3):
            wrapped.zero_grad()
            step(wrapped, batch())
    as_before.clear()
    found = []
    for wrapped, known in ((one, True), (other, False)):
        if not known:
            monkeypatch.setattr(wrapped, "_before", None)
        wrapped.zero_grad()
        words = change(wrapped)
        losses(wrapped, words).mean().backward()
        found.append([p.grad for p in wrapped.parameters() if p.requires_grad])
    assert not as_before
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_sums_are_added_to_what_is_there_and_noted(as_before):
    wrapped = wrap()
    for _ in range(3):
        wrapped.zero_grad()
        once, *_ = step(wrapped, batch())
    twice, *_ = step(wrapped, batch())
    assert len(as_before) == 3
    assert all(torch.equal(x, 2 * y) for x, y in zip(twice, once, strict=True))
    assert not wrapped._module.unused.weight.grad.any()
    wrapped.zero_grad()
    wrapped.forbid_grad_accumulation()
    step(wrapped, batch())
    with pytest.raises(dpfast.errors.StateError, match="accumulation"):
        step(wrapped, batch())


def test_parameters_of_another_dtype_whose_layers_autocast_runs_the_same(as_before):
    def run(wrapped):
        wrapped.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = wrapped(x)
        output.float().square().sum().backward()
        return [p.grad.clone() for p in wrapped.parameters()]

    x, wrapped = torch.randn(N, D), dpfast.GradSampleModuleFastGradientClipping(nn.Linear(D, 5), max_grad_norm=C)
    for _ in range(2):
        run(wrapped)
    assert as_before
    other = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(D, 5), max_grad_norm=C)
    other._module.load_state_dict(wrapped._module.state_dict())
    for one, expected in zip(run(wrapped.bfloat16()), run(other.bfloat16()), strict=True):
        assert one.dtype is torch.bfloat16 and torch.equal(one, expected)


def test_a_sample_that_is_not_finite_is_dropped(as_before):
    wrapped = wrap()
    for _ in range(2):
        wrapped.zero_grad()
        step(wrapped, batch())
    with torch.no_grad():
        wrapped._module.words.weight[0] = math.nan
    words = batch().clamp(min=1)
    words[1, 0] = 0
    wrapped.zero_grad()
    with pytest.warns(DpfastWarning, match="inf or NaN"):
        step(wrapped, words)
    assert as_before and wrapped.nonfinite_samples == 1
    assert wrapped._clip_factors[1] == 0 and all(p.grad.isfinite().all() for p in wrapped.parameters())


class OfOnesOwn(dpfast.ConstantFlatClipper):
    """Asked for its factors, as any clipper is of which no more is known."""


def test_factors_are_those_of_the_clipper():
    numbers = [0.0, 5e-324, 1e-300, 0.3, 0.999999, 1.0, 1.0000001, 7.0, 1e150, 1e308, math.inf, math.nan]
    for limit in (1e-300, 1e-6, 1.0, 3.7, 1e100):
        squares = torch.tensor(numbers, dtype=torch.float64)
        norm = SquaredNorm(squares * 0.99, squares)
        valid = torch.arange(len(numbers)) % 3 > 0
        scales = (1.0, 12.0, torch.linspace(0.5, 12.0, len(numbers), dtype=torch.float64))
        for scale, number, mask, excess in itertools.product(scales, (1, 5), (None, valid), (0.0, 1e-3)):
            asked = {"scale": scale, "rounding": [excess] * number, "valid": mask}
            value, upper = (x.expand(number, -1).cumsum(0)[-1] for x in norm)
            one = clip_to(limit, SquaredNorm(value, upper), scale, added=number, excess=excess, valid=mask)
            for clipper in (dpfast.ConstantFlatClipper(limit), OfOnesOwn(limit)):
                other = clip(clipper, [norm] * number, **asked)
                for name, x, y in zip(one._fields, one, other, strict=True):
                    assert torch.equal(x.nan_to_num(-1.0), y.nan_to_num(-1.0)), (name, limit, scale, number, excess)
                clipper.flat_value = limit / 2  # what was clipped before remains so
                assert clipper.take_sensitivity() == limit


def zeros_in_place(wrapped):
    for p in wrapped.parameters():
        p.grad.zero_()


@pytest.mark.parametrize("marked", [True, False])
def test_sums_that_are_known_are_added_to_zeros(marked, as_before, monkeypatch):
    """As optimizers of Opacus leave them, whose ``zero_grad()`` sets no gradient to None."""
    one, other = wrap(), wrap()
    for wrapped in (one, other):
        for seed in range(2):
            wrapped.zero_grad()
            step(wrapped, batch(seed=seed))
    monkeypatch.setattr(deferred.Deferred, "alikes", None)  # what the long way asks
    other.zero_grad()
    expected = step(other, batch(seed=2))
    zeros_in_place(one)
    if marked:
        note_zeros(one.parameters())
    grads = [p.grad for p in one.parameters()]
    same(step(one, batch(seed=2)), expected)
    assert all(p.grad is grad for p, grad in zip(one.parameters(), grads, strict=True))  # who holds them sees the sums
    assert held_by(one.parameters()).passes == 1 and len(as_before) == 4
    twice, *_ = step(one, batch(seed=2))  # and to sums
    assert all(torch.equal(x, 2 * y) for x, y in zip(twice, expected[0], strict=True))
    assert held_by(one.parameters()).passes == 2


def test_what_no_private_pass_has_left_is_refused_by_the_short_way_too(as_before):
    wrapped = wrap()
    for _ in range(3):
        wrapped.zero_grad()
        step(wrapped, batch())
    wrapped.zero_grad()
    kept = wrapped._module.head.weight.grad = torch.ones_like(wrapped._module.head.weight)
    with pytest.raises(StateError, match=r"head\.weight"):
        losses(wrapped, batch()).mean().backward()
    assert torch.equal(kept, torch.ones_like(kept)) and wrapped._module.words.weight.grad is None


@pytest.mark.parametrize("features", [(12, 40), (40, 12), (64, 3)])
@pytest.mark.parametrize("rows", [(), (5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_inputs_have_the_bits_of_weighted_sum(features, rows, dtype):
    """Where no sample is dropped, of one layer and of several."""
    d, p = features
    for layers in (1, 3):
        a, b = torch.randn(layers * N, *(rows or (1,)), d, dtype=dtype), torch.randn(layers * N, *(rows or (1,)), p)
        factor, c = OuterProduct.of_rows(a, b), torch.rand(N) + 0.1
        for one, other in zip(sums_of_all_inputs(factor, layers, c), sums_of_inputs(factor, layers, c), strict=True):
            assert torch.equal(one, other)


def test_sums_leave_room_for_products_in_less_than_fp32(monkeypatch):
    a, b, c = torch.randn(N, 1, 12), torch.randn(N, 1, 40), torch.rand(N) + 0.1
    factor = OuterProduct.of_rows(a, b)
    (exact,) = sums_of_all_inputs(factor, 1, c)
    monkeypatch.setattr(ops, "reduced_products", lambda: 2.0**-7)
    (less,) = sums_of_all_inputs(factor, 1, c)
    assert torch.allclose(less, exact * (1.0 - 2.0**-7)) and torch.equal(less, factor.weighted_sum(c))
