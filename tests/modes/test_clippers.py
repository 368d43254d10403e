"""Clippers, and everything that clips with them."""

import copy

import pytest
import torch
from cases import MODELS, assert_gradients, example, mean_loss, sum_loss, takes_kernels
from torch import nn

import dpfast
from dpfast.errors import InputError, StateError
from dpfast.modes.clippers import (
    AutomaticClipper,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    clip_factors,
)
from dpfast.testing import loop_over_samples, norms_of, relative_error


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


class Greedy(NormClipper):
    """A clipper with a mistake: it never clips."""

    thresholds = torch.tensor([0.5])

    def calc_clipping_factors(self, norms):
        return [torch.ones_like(norm) for norm in norms]


def per_parameter_norms(gradients):
    return {name: norms_of({name: g}) for name, g in gradients.items()}


def weighted(gradients, factors):
    return {name: torch.einsum("n,n...->...", factors[name], g) for name, g in gradients.items()}


def as_told(wrapped, factors):
    """These, or the module's own where kernels run, which are less by what its bounds add: of one parameter some 1e-4
    (docs/bounds.md)."""
    told = wrapped.get_clipping_coef().double()
    if not takes_kernels(told):
        return factors
    told = dict(zip(factors, told if told.dim() > 1 else [told] * len(factors), strict=True))
    for name, factor in factors.items():
        assert (told[name] <= factor * (1 + 1e-7)).all() and relative_error(told[name], factor) <= 2e-4, name
    return told


# --- clippers ---


@pytest.mark.parametrize("c", [0.1, 1.0, 30.0])
def test_factors_of_the_built_in_clippers(c):
    norms = torch.tensor([0.0, 1e-30, 0.05, 1.0, 7.0, 1e30]).double()
    (flat,) = clip_factors(ConstantFlatClipper(c), [norms])
    assert torch.allclose(flat, (c / norms).clamp(max=1.0), rtol=1e-6)
    (automatic,) = clip_factors(AutomaticClipper(c, gamma=0.1), [norms])
    assert torch.allclose(automatic, c / (norms + 0.1), rtol=1e-6)
    layers = clip_factors(ConstantPerLayerClipper([c, 2 * c]), [norms, norms])
    assert torch.equal(layers[0], flat)
    assert torch.allclose(layers[1], (2 * c / norms).clamp(max=1.0), rtol=1e-6)
    for factors, limit in ((flat, c), (automatic, c), (layers[1], 2 * c)):
        for rounded in (factors, factors.float().double(), (factors.float() * 777.0).double() / 777.0):
            assert (rounded * norms <= limit).all()


def test_a_clipper_with_a_mistake_costs_no_privacy():
    (factors,) = clip_factors(Greedy(), [torch.tensor([0.1, 0.5, 5.0])])
    assert torch.allclose(factors, torch.tensor([1.0, 1.0, 0.1]).double(), rtol=1e-6)

    class Negative(Greedy):
        def calc_clipping_factors(self, norms):
            return [torch.tensor([-1.0, float("nan"), float("inf")])]

    assert clip_factors(Negative(), [torch.ones(3)])[0].tolist() == [0.0, 0.0, 0.0]

    class WrongShape(Greedy):
        def calc_clipping_factors(self, norms):
            return [norms[0][:, None] * norms[0]]  # [N, 1] against [N], the broadcast to [N, N]

    with pytest.raises(InputError, match=r"\(3, 3\).*\(3,\)"):
        clip_factors(WrongShape(), [torch.ones(3)])


def test_norms_that_are_not_finite_get_zero():
    norms = torch.tensor([1.0, float("nan"), float("inf")])
    for clipper in (ConstantFlatClipper(1.0), AutomaticClipper(1.0), Greedy()):
        assert clip_factors(clipper, [norms])[0][1:].tolist() == [0.0, 0.0]


def test_sensitivity():
    assert ConstantFlatClipper(2.0).sensitivity == 2.0
    assert AutomaticClipper(2.0).sensitivity == 2.0
    assert ConstantPerLayerClipper([3.0, 4.0]).sensitivity == 5.0
    one_for_all = ConstantPerLayerClipper(1.0)
    with pytest.raises(StateError, match="number is not known yet"):
        _ = one_for_all.sensitivity
    one_for_all.for_parameters(4)
    assert one_for_all.sensitivity == 2.0
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(2, 2), norm_clipper=ConstantPerLayerClipper(3.0))
    assert wrapped.sensitivity == pytest.approx(3.0 * 2**0.5)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_thresholds_out_of_range(bad):
    for build in (
        ConstantFlatClipper,
        AutomaticClipper,
        lambda c: AutomaticClipper(1.0, gamma=c),
        lambda c: ConstantPerLayerClipper([1.0, c]),
    ):
        with pytest.raises(InputError, match="positive finite"):
            build(bad)


def test_wrong_number_of_thresholds_or_norms():
    clipper = ConstantPerLayerClipper([1.0, 2.0, 3.0])
    for build in (
        lambda m: dpfast.GradSampleModuleFastGradientClipping(m, norm_clipper=clipper),
        lambda m: dpfast.PerSampleGradientClipper(m, clipper),
    ):
        model = nn.Linear(2, 2)
        with pytest.raises(InputError, match="3 thresholds for 2 trainable parameters"):
            build(model)
        assert "forward" not in model.__dict__
    with pytest.raises(InputError, match="not 2 norms"):
        ConstantFlatClipper(1.0).calc_clipping_factors([torch.ones(2)] * 2)
    with pytest.raises(InputError, match="passes=1, or a flat clipper"):
        dpfast.GradSampleModuleFastGradientClipping(
            nn.Linear(2, 2), passes=2, norm_clipper=ConstantPerLayerClipper(1.0)
        )


# --- in the backward pass ---


@pytest.mark.parametrize("name", MODELS)
def test_per_layer_clipping(name):
    model, x, y = example(name)
    gradients = loop_over_samples(model, sum_loss, x, y)
    limits = [0.05 * (i + 1) for i in range(len(gradients))]
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, norm_clipper=ConstantPerLayerClipper(limits))
    mean_loss(wrapped, x, y).backward()
    norms = per_parameter_norms(gradients)
    factors = {n: (c / norms[n]).clamp(max=1.0) for (n, _), c in zip(gradients.items(), limits, strict=True)}
    assert wrapped.get_clipping_coef().shape == (len(limits), 6)
    assert_gradients(grads(model), weighted(gradients, as_told(wrapped, factors)))
    assert relative_error(wrapped.get_norm_sample(), norms_of(gradients)) <= 1e-5


def test_per_layer_clipping_keeps_nothing():
    """A layer's clipped sum is there before the layers below it have been differentiated."""
    model, x, y = example("mlp")
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, norm_clipper=ConstantPerLayerClipper(1.0))
    seen = []
    original = wrapped.on_factor

    def watched(step, parameter, factor, only_use):
        original(step, parameter, factor, only_use)
        seen.append((len(step.gathered[parameter].factors), step.gathered[parameter].total is not None))

    wrapped.on_factor = watched
    mean_loss(wrapped, x, y).backward()
    assert seen == [(0, True)] * 6


def test_per_layer_clipping_of_a_model_called_twice():
    model, x, y = example("mlp")
    other = torch.randn_like(x)

    def loss(m, x, other, y):
        return sum_loss(m, x, y) + sum_loss(m, other, y)

    gradients = loop_over_samples(model, loss, x, other, y)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", norm_clipper=ConstantPerLayerClipper(0.1)
    )
    loss(wrapped, x, other, y).backward()
    norms = per_parameter_norms(gradients)
    factors = {n: (0.1 / norm).clamp(max=1.0) for n, norm in norms.items()}
    assert_gradients(grads(model), weighted(gradients, as_told(wrapped, factors)))


@pytest.mark.parametrize("name", MODELS)
def test_automatic_and_custom_clippers(name):
    class Linearly(NormClipper):
        is_per_layer = True
        thresholds = None

        def for_parameters(self, num_parameters):
            self.thresholds = torch.full((num_parameters,), 0.2)

        def calc_clipping_factors(self, norms):
            return [0.2 / (1.0 + norm) for norm in norms]

    model, x, y = example(name)
    gradients = loop_over_samples(model, sum_loss, x, y)
    whole = norms_of(gradients)
    automatic = dict.fromkeys(gradients, 0.3 / (whole + 0.01))
    linearly = {n: 0.2 / (1.0 + norm) for n, norm in per_parameter_norms(gradients).items()}
    for clipper, factors in ((AutomaticClipper(0.3), automatic), (Linearly(), linearly)):
        other = copy.deepcopy(model)
        wrapped = dpfast.GradSampleModuleFastGradientClipping(other, norm_clipper=clipper)
        mean_loss(wrapped, x, y).backward()
        assert_gradients(grads(other), weighted(gradients, as_told(wrapped, factors)))


# --- PerSampleGradientClipper ---


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("per_layer", [True, False])
def test_clip_accumulate_and_step(name, reduction, per_layer):
    model, x, y = example(name, 7)
    gradients = loop_over_samples(model, sum_loss, x, y)
    count = len(gradients)
    clipper = dpfast.PerSampleGradientClipper(
        model,
        ConstantPerLayerClipper(0.1) if per_layer else ConstantFlatClipper(0.5),
        loss_reduction=reduction,
    )
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):  # a smaller last batch
        (mean_loss if reduction == "mean" else sum_loss)(model, x[part], y[part]).backward()
        clipper.clip_and_accumulate()
        assert all(p.grad_sample is None for p in model.parameters())
        model.zero_grad()
    thresholds, samples = clipper.pre_step()
    assert samples == 7
    assert thresholds.shape == (count,)
    assert torch.allclose(thresholds.cpu(), torch.tensor(0.1 * count**0.5 if per_layer else 0.5, device="cpu"))
    if per_layer:
        factors = {n: (0.1 / norm).clamp(max=1.0) for n, norm in per_parameter_norms(gradients).items()}
    else:
        factors = dict.fromkeys(gradients, (0.5 / norms_of(gradients)).clamp(max=1.0))
    divisor = 7 if reduction == "mean" else 1
    assert_gradients(grads(model), {n: g / divisor for n, g in weighted(gradients, factors).items()})
    clipper.close()
    clipper.close()
    assert not clipper.hooks_attached
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_empty_batch():
    model, x, y = example("mlp", 4)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    mean_loss(model, x[:0], y[:0]).backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step()[1] == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_on_batch_clip_func():
    model, x, y = example("mlp", 4)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    calls = []
    clipper.set_on_batch_clip_func(lambda **what: calls.append(what))
    mean_loss(model, x, y).backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    clipper.clip_and_accumulate()
    clipper.pre_step()
    names = [n for n, _ in model.named_parameters()]
    assert [c["param_name"] for c in calls] == [*names, None]
    assert all(value is None for value in calls[-1].values())
    for call in calls[:-1]:
        assert call["clipping_factor"].shape == call["per_sample_norm"].shape == (4,)
        assert call["clipping_threshold"] == 0.5
        assert torch.equal(call["grad_before_clip"], plain[call["param_name"]])
        assert torch.allclose(call["grad_after_clip"], model.get_parameter(call["param_name"]).grad)
        assert call["per_sample_grad"].shape == (4, *plain[call["param_name"]].shape)


def test_calls_in_the_wrong_order():
    model, x, y = example("mlp", 4)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    with pytest.raises(StateError, match="clip_and_accumulate first"):
        clipper.pre_step()
    with pytest.raises(StateError, match=r"0\.weight, 0\.bias.*call loss\.backward\(\)"):
        clipper.clip_and_accumulate()
    mean_loss(model, x, y).backward()
    clipper.zero_grad()
    with pytest.raises(StateError):
        clipper.clip_and_accumulate()
    mean_loss(model, x, y).backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step()[1] == 4


def test_deleting_the_clipper_takes_it_off():
    model, _, _ = example("mlp", 4)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    del clipper
    import gc

    gc.collect()
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("passes", [1, 2])
def test_a_clipper_is_not_swapped_within_a_backward_pass(passes):
    """Some layers would be clipped with the first one, and the sensitivity would be the other's."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    first = ConstantPerLayerClipper([0.1] * 4) if passes == 1 else ConstantFlatClipper(0.1)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, norm_clipper=first, passes=passes)
    outputs = wrapped(torch.randn(4, 3))

    def swap(grad):
        wrapped.norm_clipper = ConstantFlatClipper(0.001)

    outputs.register_hook(swap)
    with pytest.raises(StateError, match="cannot be set while a backward pass runs"):
        outputs.square().sum().backward()
    assert wrapped.norm_clipper is first and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [1.0, 3e-5, 3e-6])
def test_sums_in_16_bits_are_no_longer_than_clipped_ones(dtype, threshold):
    """Their rounding is bounded too: one sample's share of what is left never exceeds C."""
    for step in range(6):
        limit = threshold * (1 + step / 6)
        model = nn.Linear(64, 64, bias=False).to(dtype)
        clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(limit), loss_reduction="sum")
        model(torch.ones(1, 64, dtype=dtype)).float().sum().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        norm = model.weight.grad.double().norm().item()
        assert norm <= limit
        assert norm > 0.9 * limit or dtype is torch.float16  # whose numbers end there, rounded towards zero


def test_batches_in_16_bits_are_added_in_fp32():
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(1e-3), loss_reduction="sum")
    for _ in range(1000):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
        clipper.clip_and_accumulate()
    clipper.pre_step()
    assert abs(model.weight.grad.double().norm().item() - 1.0) < 0.01  # in bf16 it would stop at a quarter


class Fixed(NormClipper):
    is_per_layer = True

    def __init__(self, thresholds):
        self._thresholds = torch.tensor(thresholds)

    @property
    def thresholds(self):
        return self._thresholds

    def calc_clipping_factors(self, norms):
        return [(c / norm).clamp(max=1.0) for c, norm in zip(self.thresholds, norms, strict=True)]


@pytest.mark.parametrize("wrong", [torch.nan, -1.0])
def test_thresholds_that_bound_nothing_are_refused(wrong):
    """A quantile of norms of which one is NaN is NaN."""
    model, x, y = example("mlp", 4)
    number = len(list(model.parameters()))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, norm_clipper=Fixed([wrong] + [5.0] * (number - 1)))
    with pytest.raises(InputError, match=r"thresholds .* not negative"):
        mean_loss(wrapped, x, y).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("given", [1.0, "flat", dpfast.ConstantFlatClipper], ids=str)
def test_what_is_no_clipper_is_refused(given):
    for wrap in (
        lambda: dpfast.PerSampleGradientClipper(nn.Linear(2, 2), given),
        lambda: dpfast.GradSampleModuleFastGradientClipping(nn.Linear(2, 2), norm_clipper=given),
    ):
        with pytest.raises(InputError, match=r"is no NormClipper: give an object"):
            wrap()
