"""GradSampleModuleFastGradientClipping: norms, factors and clipped sums against a loop over samples in fp64."""

import copy

import pytest
import torch
from cases import MODELS, clipped_as_told, example, mean_loss, sum_loss
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, EscapedGradientError, InputError, StateError
from dpfast.factors import OuterProduct
from dpfast.testing import loop_over_samples, norms_of, relative_error

C = 0.5


def wrap(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, **options)


def assert_clipped(model, exact, tolerance=1e-5):
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad.shape == p.shape and p.grad.dtype == p.dtype
            assert relative_error(p.grad, exact[name]) <= tolerance, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [0, 1, 6])
@pytest.mark.parametrize(("reduction", "loss"), [("mean", mean_loss), ("sum", sum_loss)])
@pytest.mark.parametrize("ghost", [True, False])
def test_one_pass_equals_loop_over_samples(name, n, reduction, loss, ghost):
    model, x, y = example(name, n)
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped = wrap(model, loss_reduction=reduction, use_ghost_clipping=ghost)
    loss(wrapped, x, y).backward()
    norms = norms_of(gradients)
    assert wrapped.get_norm_sample().shape == (n,)
    assert relative_error(wrapped.get_norm_sample(), norms) <= 1e-5
    assert torch.equal(wrapped.per_sample_gradient_norms, wrapped.get_norm_sample())
    assert_clipped(model, clipped_as_told(wrapped.get_clipping_coef(), gradients, C))
    exact_factors = (C / norms).clamp(max=1.0)
    factors = wrapped.get_clipping_coef()
    assert (factors.double() * norms <= C).all()
    assert (factors >= exact_factors * 0.999).all()
    assert (wrapped.norm_slack >= 0.0).all() and (wrapped.norm_slack <= 1e-3).all()


@pytest.mark.parametrize("name", MODELS)
def test_two_passes_give_the_same(name):
    model, x, y = example(name)
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped = wrap(model, passes=2)
    losses = torch.nn.functional.cross_entropy(wrapped(x), y, reduction="none")
    losses.mean().backward(retain_graph=True)
    assert all(p.grad is None for p in model.parameters())
    wrapped.disable_hooks()
    (wrapped.get_clipping_coef() * losses).sum().backward()
    wrapped.enable_hooks()
    assert_clipped(model, clipped_as_told(wrapped.get_clipping_coef(), gradients, C))


def test_gradients_add_up_over_backwards():
    model, x, y = example("transformer", 6)
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped, factors = wrap(model), []
    for part in (slice(0, 4), slice(4, 6)):
        mean_loss(wrapped, x[part], y[part]).backward()
        factors.append(wrapped.get_clipping_coef())
    assert_clipped(model, clipped_as_told(torch.cat(factors), gradients, C))


def test_unused_parameters_get_zeros_so_that_noise_reaches_them():
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["used"](x)

    wrapped = wrap(Half())
    wrapped(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model["unused"].weight.grad, torch.zeros(3, 3))
    assert model["used"].weight.grad.abs().sum() > 0


def test_frozen_base_costs_nothing_and_gets_nothing():
    model, x, y = example("transformer")
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith("head")
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped = wrap(model)
    mean_loss(wrapped, x, y).backward()
    assert_clipped(model, clipped_as_told(wrapped.get_clipping_coef(), gradients, C))
    assert model.qkv.weight.grad is None


@pytest.mark.usefixtures("reference_runs")
def test_autograd_computes_no_summed_weight_gradient():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    loss = mean_loss(wrapped, x, y)
    seen = []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(grad))
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    assert all(grad is None for grad in seen)
    # Two Linears: one product for the input of the second, and one clipped sum or one set of gradients each.
    found = [e for e in profile.events() if e.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    products = [e.name for e in found if e.input_shapes[0][-2] > 1]  # of matrices, not a bias's sum
    assert len(products) == 3, products


def test_low_precision_parameters():
    model, x, y = example("mlp")
    model, x = model.bfloat16(), x.bfloat16()
    wrapped = wrap(model)
    mean_loss(wrapped, x, y).backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert wrapped.get_norm_sample().dtype == torch.float32


@pytest.mark.parametrize("large", [False, True])
def test_autocast_backward_is_exact(large):
    model, x, y = example("mlp")
    if large:  # its gradients are kept in blocks, made by a product that autocast would take in bf16
        model, x, y = nn.Linear(3, 12000), torch.randn(9, 4, 3), torch.randn(9, 4, 12000)
    other = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mean_loss(wrap(model), x, y)
        loss.backward()
        outside = mean_loss(wrap(other), x, y)
    outside.backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_adds_exactly_nothing(poison):
    model, x, y = example("mlp", 5)
    keep = torch.tensor([0, 1, 3, 4])
    clean = copy.deepcopy(model)
    finite = wrap(clean, loss_reduction="sum")
    sum_loss(finite, x, y).backward()
    exact = loop_over_samples(model, sum_loss, x[keep], y[keep])
    x[2] = poison
    wrapped = wrap(model, loss_reduction="sum")
    with pytest.warns(DpfastWarning, match="1 of 5 samples"):
        sum_loss(wrapped, x, y).backward()
        assert wrapped.nonfinite_samples == 1
    assert wrapped.get_clipping_coef()[2] == 0
    assert torch.equal(wrapped.get_clipping_coef()[keep], finite.get_clipping_coef()[keep])
    assert torch.equal(wrapped.get_norm_sample()[keep], finite.get_norm_sample()[keep])
    assert_clipped(model, clipped_as_told(wrapped.get_clipping_coef()[keep], exact, C))


@pytest.mark.parametrize("name", MODELS)
def test_a_samples_norm_does_not_depend_on_its_batch(name):
    model, x, y = example(name, 5)
    wrapped = wrap(model, loss_reduction="sum")

    def norms(x, y):
        sum_loss(wrapped, x, y).backward()
        return wrapped.get_norm_sample()

    together = norms(x, y)
    order = torch.tensor([4, 2, 0, 3, 1])
    # The layers' own matrix products may round differently in another batch; the norms add nothing to that.
    assert torch.allclose(norms(x[order], y[order]), together[order], rtol=1e-6)
    assert torch.allclose(norms(x[2:3], y[2:3]), together[2:3], rtol=1e-6)


def test_max_grad_norm_may_change_between_steps():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    mean_loss(wrapped, x, y).backward()
    before = wrapped.get_clipping_coef()
    wrapped.zero_grad()
    wrapped.max_grad_norm = 2 * C
    assert wrapped.sensitivity == 2 * C
    mean_loss(wrapped, x, y).backward()
    assert torch.allclose(wrapped.get_clipping_coef(), (2 * before).clamp(max=1.0))


def test_create_norm_sample():
    p = nn.Parameter(torch.zeros(2, 3))
    g = torch.randn(4, 2, 3)
    dpfast.create_norm_sample(param=p, grad_sample=g, max_batch_len=4)
    assert torch.allclose(p._norm_sample, g.flatten(1).norm(dim=1))
    dpfast.create_norm_sample(param=p, grad_sample=g[:0], max_batch_len=0)
    assert p._norm_sample.shape == (0,)


# --- nothing escapes ---


def test_functional_use_of_a_weight_is_an_error():
    class Escape(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x, functional):
            x = self.first(x)
            return torch.cdist(x, self.head.weight) if functional else self.head(x)

    model = Escape()
    wrapped = wrap(model)
    with pytest.raises(EscapedGradientError, match=r"parameter head\.\w+"):
        wrapped(torch.ones(4, 3), functional=True).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    wrapped(torch.ones(4, 3), functional=False).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_penalty_on_the_weights_is_an_error():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    with pytest.raises(EscapedGradientError, match="weight decay belongs in the optimizer"):
        (mean_loss(wrapped, x, y) + model[0].weight.square().sum()).backward()


def test_parameter_added_or_unfrozen_after_wrapping():
    model, x, y = example("mlp")
    model[0].weight.requires_grad = False
    wrapped = wrap(model)
    model[0].weight.requires_grad = True
    model.extra = nn.Parameter(torch.ones(()))
    with pytest.raises(EscapedGradientError, match="parameter extra"):
        (wrapped(x) * model.extra).sum().backward()
    wrapped.zero_grad()
    gradients = loop_over_samples(copy.deepcopy(wrapped).to_standard_module(), sum_loss, x, y)
    mean_loss(wrapped, x, y).backward()
    expected = clipped_as_told(wrapped.get_clipping_coef(), gradients, C)
    assert relative_error(model[0].weight.grad, expected["0.weight"]) <= 1e-5


# --- bad input ---


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "1", None])
def test_max_grad_norm_out_of_range(bad):
    with pytest.raises(InputError, match="positive finite"):
        dpfast.GradSampleModuleFastGradientClipping(nn.Linear(2, 2), max_grad_norm=bad)
    with pytest.raises(InputError, match="positive finite"):
        dpfast.ConstantFlatClipper(bad)


def test_calls_at_the_wrong_time():
    wrapped = wrap(nn.Linear(2, 2))
    for read in (wrapped.get_norm_sample, wrapped.get_clipping_coef):
        with pytest.raises(StateError, match="no backward pass"):
            read()
    with pytest.raises(AttributeError, match="per_sample_gradient_norms is not set"):
        _ = wrapped.per_sample_gradient_norms
    with pytest.raises(InputError, match="passes=3"):
        wrap(nn.Linear(2, 2), passes=3)


def test_sums_of_fp16_parameters_are_not_rounded_by_the_kernel(kernels_run, monkeypatch):
    """It rounds to nearest; of fp16 nothing bounds that."""
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(6, 8, bias=False).half(), max_grad_norm=1.0)
    asked, taken = [], OuterProduct.weighted_sum

    def seen(self, coefficients, dtype=None):
        asked.append(dtype)
        return taken(self, coefficients, dtype)

    monkeypatch.setattr(OuterProduct, "keeps", False)
    monkeypatch.setattr(OuterProduct, "weighted_sum", seen)
    wrapped(torch.randn(4, 5, 6).half()).float().sum().backward()
    assert asked == [None] and all(p.grad.dtype is torch.float16 for p in wrapped.parameters())


def test_sums_of_bf16_parameters_are_rounded_once(kernels_run, monkeypatch):
    """Where kernels run they are written in bf16, unless something is added to them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    wrapped, x = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0), torch.randn(4, 5, 6).bfloat16()
    sums, taken = [], OuterProduct.weighted_sum

    def seen(self, coefficients, dtype=None):
        sums.append((taken(self, coefficients), dtype))
        return taken(self, coefficients, dtype)

    monkeypatch.setattr(OuterProduct, "keeps", False)
    monkeypatch.setattr(OuterProduct, "weighted_sum", seen)
    wrapped(x).float().square().sum((1, 2)).sum().backward()
    assert [dtype for _, dtype in sums] == [torch.bfloat16] * 2
    for layer, (total, _) in zip((model[0], model[2]), sums, strict=True):
        off = (layer.weight.grad.float() - total).abs()  # by less than two roundings; the interpreter's is towards zero
        assert (off <= total.abs() * 2.0**-7).all()
    sums.clear()
    wrapped(x).float().square().sum((1, 2)).sum().backward()  # is added in fp32
    assert [dtype for _, dtype in sums] == [None] * 2
