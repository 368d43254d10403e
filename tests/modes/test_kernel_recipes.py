"""Where kernels run, what a rule of ours has answered once for a layer is made again without it: the same bits."""

import copy

import pytest
import torch
from torch import nn

import dpfast
from dpfast.arithmetic import RowNorms, lowered
from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.errors import StateError
from dpfast.factors import KernelRecipe, outer_product
from dpfast.modes import deferred, tapped_model
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

N, T, D = 2, 2, 16  # multiples of 16: Triton 3.4's interpreter asks that of a descriptor's rows
LONG = 8  # positions from which gradients are kept
C = 0.5


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels, and layers that are too large to wait for each other, as most are on a GPU, and not thin."""
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    monkeypatch.setattr(import_kernels()[0], "groups", lambda t, d, p: False)
    monkeypatch.setattr("dpfast.rules.normalization._is_taken_in_fp64", lambda *of: False)
    monkeypatch.setattr(deferred, "SMALL", {})
    monkeypatch.setattr(deferred, "_recipes", {})
    monkeypatch.setattr(deferred, "_kinds", {})


@pytest.fixture
def asked(monkeypatch):
    """Layers whose rules have been asked, by the general way or to be learned from."""
    found = []

    def factors(self, record, activations, backprops):
        found.append(record.tap.name)
        return before(self, record, activations, backprops)

    before = tapped_model.TappedModel.factors
    monkeypatch.setattr(tapped_model.TappedModel, "factors", factors)
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D, bias=False)
        self.scale = nn.RMSNorm(D)

    def forward(self, x):
        return x + self.scale(self.down(torch.tanh(self.up(self.norm(x)))))


def blocks(dtype=torch.float32, number=1):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(number)), nn.Linear(D, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype)


def losses(model, x):
    return model(x).float().square().flatten(1).sum(1)


def steps(model, *inputs, **options):
    """The wrapped model after a step on each, and norms and sums of each."""
    wrapped, found = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, **options), []
    for x in inputs:
        wrapped.zero_grad()
        losses(wrapped, x).mean().backward()
        found.append(
            [
                wrapped.get_norm_sample(),
                wrapped.norm_slack,
                *(p.grad.clone() for p in wrapped.parameters() if p.requires_grad),
            ]
        )
    return wrapped, found


def x_of(seed, t, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(N, *([t] if t else []), D).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [T, LONG, 0], ids=["inputs kept", "gradients kept", "no positions"])
def test_the_same_bits_as_by_the_rules(t, dtype, monkeypatch, asked):
    inputs = [x_of(seed, t, dtype) for seed in range(2)]
    _, found = steps(blocks(dtype), *inputs)
    assert len(asked) == 5  # kinds
    monkeypatch.setattr(deferred.KernelRecipe, "learned", classmethod(lambda cls, *of: None))
    monkeypatch.setattr(deferred, "_recipes", {})
    monkeypatch.setattr(deferred, "_kinds", {})
    asked.clear()
    _, alone = steps(blocks(dtype), *inputs)
    assert len(asked) == 2 * 5 + 5
    for of_step, by_rules in zip(found, alone, strict=True):
        for one, other in zip(of_step, by_rules, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("t", [T, LONG, 0])
def test_as_a_loop_over_samples(t):
    model, inputs = blocks(), [x_of(seed, t) for seed in range(2)]
    _, found = steps(model, *inputs)
    for x, (norms, slack, *grads) in zip(inputs, found, strict=True):
        exact = loop_over_samples(blocks().double(), lambda m, x: losses_in_fp64(m, x).sum(), x.double())
        of_all = torch.stack([g.flatten(1).norm(dim=1) for g in exact.values()]).norm(dim=0)
        assert relative_error(norms, of_all) <= 1e-5
        assert (slack >= 0).all()
        sums = clipped_sum(exact, C)
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            assert relative_error(grad, sums[name]) <= 1e-4, name


def losses_in_fp64(model, x):
    return model(x).square().flatten(1).sum(1)


def test_a_rule_is_asked_once_a_kind(asked):
    wrapped, _ = steps(blocks(number=2), x_of(1, T))
    assert len(asked) == 5  # of two blocks and a head
    losses(wrapped, x_of(2, T)).mean().backward()
    losses(wrapped, x_of(2, T)[:1]).mean().backward()  # of fewer samples, too
    assert len(asked) == 5


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_parts_of_a_layer(trained, monkeypatch):
    def model():
        found = blocks()
        for name, p in found.named_parameters():
            p.requires_grad_(name.endswith(trained))
        return found

    x, model_of = x_of(1, T), model()
    wrapped, _ = steps(model_of, x, x)
    alone = model().double()
    exact = loop_over_samples(alone, lambda m, x: losses_in_fp64(m, x).sum(), x.double())
    sums = clipped_sum(exact, C)
    for name, p in wrapped._module.named_parameters():
        assert (p.grad is not None) == name.endswith(trained)
        if p.grad is not None:
            assert relative_error(p.grad, sums[name]) <= 1e-4, name


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.layer(torch.tanh(self.layer(x))))


def test_a_layer_that_is_used_twice_has_one_norm():
    torch.manual_seed(0)
    model, x = Twice(), x_of(1, T)
    exact = loop_over_samples(model.double(), lambda m, x: losses_in_fp64(m, x).sum(), x.double())
    wrapped, _ = steps(model.float(), x, x)
    sums = clipped_sum(exact, C)
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad, sums[name]) <= 1e-4, name


def test_a_use_that_forwards_have_not_shown_is_added(monkeypatch):
    """As of a region that a reentrant checkpoint runs again, whose parameters the forward has not counted."""
    found = []
    before = deferred.Deferred.takes

    def takes(self, record, activations, backprops):
        record.uses = None if found else record.uses  # the second is not known to be the only one
        found.append(record.tap.name)
        return before(self, record, activations, backprops)

    torch.manual_seed(0)
    model, x = Twice(), x_of(1, T)
    exact = loop_over_samples(model.double(), lambda m, x: losses_in_fp64(m, x).sum(), x.double())
    monkeypatch.setattr(deferred.Deferred, "takes", takes)
    wrapped, _ = steps(model.float(), x)
    sums = clipped_sum(exact, C)
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad, sums[name]) <= 1e-4, name


def test_a_write_to_what_is_kept_is_seen():
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.other = other
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            ctx.other.mul_(2.0)
            return grad, None

    torch.manual_seed(0)
    first, second = nn.Linear(D, D), nn.Linear(D, D)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            h = Writes.apply(self.first(x), kept := torch.tanh(x).detach())
            return self.second(kept) + h

    wrapped = dpfast.GradSampleModuleFastGradientClipping(Model(), max_grad_norm=C)
    for _ in range(2):
        wrapped.zero_grad()
        with pytest.raises(StateError, match="was written to while the backward pass went on"):
            losses(wrapped, x_of(1, T)).mean().backward()


def test_others_rules_are_asked_each_time(asked):
    class Own(nn.Linear):
        pass

    seen = []

    @dpfast.register_rule(Own, fresh=True, alike=lambda layer: ())
    def own(layer, activations, backprops):
        seen.append(layer)
        return {layer.weight: dpfast.factors.OuterProduct(activations[0], backprops)}

    torch.manual_seed(0)
    steps(nn.Sequential(Own(D, D, bias=False)), x_of(1, T), x_of(2, T))
    assert len(seen) >= 2


def test_parameters_of_another_shape_are_an_error_as_before():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3))
    wrapped, _ = steps(model, x_of(1, T))
    loss = losses(wrapped, x_of(1, T)).mean()
    model[0].bias.data = torch.zeros(D + 1)
    with pytest.raises(dpfast.errors.UnsupportedModuleError, match="its rule gives gradients"):
        loss.backward()


def test_no_more_is_held_than_by_the_rules():
    """Of gradients that are written, nothing that they were made of."""
    torch.manual_seed(0)
    held = []
    model = nn.Sequential(nn.Linear(D, D, bias=False), nn.Tanh(), nn.Linear(D, D, bias=False), nn.Tanh())
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    finish = type(wrapped).on_finish

    def on_finish(self, step):
        held.extend(type(f).__name__ for e in step.gathered.values() for f in e.factors)
        finish(self, step)

    type(wrapped).on_finish = on_finish
    try:
        for _ in range(2):
            losses(wrapped, x_of(1, LONG)).mean().backward()
            wrapped.zero_grad()
    finally:
        type(wrapped).on_finish = finish
    assert held == ["Dense"] * 4


def test_a_recipe_is_of_what_it_was_learned_from(monkeypatch):
    """None of what is asked to wait, nor of what the reference takes."""
    from dpfast.factors import OuterProduct

    a, b = torch.randn(N, T, D), torch.randn(N, T, D)
    assert KernelRecipe.learned([OuterProduct(a, b)], a, b) is not None
    assert KernelRecipe.learned([OuterProduct(a, b.clone())], a, b) is None
    monkeypatch.setenv("DPFAST_BACKEND", "reference")
    assert KernelRecipe.learned([OuterProduct(a, b)], a, b) is None


def test_coefficients_are_lowered_once_a_step(monkeypatch):
    """For what 16-bit products may come out too large by, which is the same for all."""
    found = []

    def lowered(coefficients, by):
        found.append(before(coefficients, by))
        assert torch.equal(found[-1], coefficients * by) and by < 1.0
        return found[-1]

    before = outer_product.lowered
    monkeypatch.setattr(outer_product, "lowered", lowered)
    model = nn.Sequential(*(nn.Linear(D, D, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    steps(model, x_of(1, T, torch.bfloat16), x_of(2, T, torch.bfloat16))
    assert [len(set(map(id, of))) for of in (found[:3], found[3:], found)] == [1, 1, 2]


def test_other_coefficients_are_lowered_anew():
    c = torch.ones(N)
    assert lowered(c, 0.5) is not lowered(c, 0.5)
    with RowNorms():
        assert lowered(c, 0.5) is lowered(c, 0.5)
        assert torch.equal(lowered(c, 0.25), c * 0.25)
        c.mul_(2.0)
        assert torch.equal(lowered(c, 0.5), torch.ones(N))
        for size in range(1, 20):  # of tensors that are gone the ids come again
            assert lowered(torch.ones(size), 0.5).shape == (size,)


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
def test_looks_need_no_copies_of_what_is_known_of_launches(monkeypatch):
    """On a GPU it leads to compiled kernels, of which there are none."""

    def copied(self, memo):
        raise TypeError("cannot pickle '_thread.RLock' object")

    monkeypatch.setattr(import_kernels()[0].Like, "__deepcopy__", copied, raising=False)
    wrapped, _ = steps(blocks(), *(x_of(seed, T) for seed in range(9)))
    assert any(tap.like is not None for tap in wrapped._tapped._taps)
    copy.deepcopy(wrapped)
