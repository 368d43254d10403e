"""GradSampleModule against a loop over samples in fp64, Opacus's semantics, bad input."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import MODELS, Mlp, Transformer, example, mean_loss, sum_loss
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, InputError, LossError, StateError, UnsupportedModuleError
from dpfast.taps import registry
from dpfast.testing import loop_over_samples, relative_error


def assert_grad_samples(model, exact, tolerance=1e-5):
    for name, p in model.named_parameters():
        assert p.grad_sample.dtype == torch.float32
        assert p.grad_sample.shape == exact[name].shape
        assert relative_error(p.grad_sample, exact[name]) <= tolerance, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [0, 1, 6])
@pytest.mark.parametrize(("reduction", "loss"), [("mean", mean_loss), ("sum", sum_loss)])
def test_equals_loop_over_samples(name, n, reduction, loss):
    model, x, y = example(name, n)
    exact = loop_over_samples(model, sum_loss, x, y)
    plain = copy.deepcopy(model)
    loss(plain, x, y).backward()
    wrapped = dpfast.GradSampleModule(model, loss_reduction=reduction)
    loss(wrapped, x, y).backward()
    assert_grad_samples(model, exact)
    if n:
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert relative_error(p.grad, q.grad) <= 1e-5


@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_force_functorch_gives_the_same(name):
    model, x, y = example(name)
    exact = loop_over_samples(model, sum_loss, x, y)
    mean_loss(dpfast.GradSampleModule(model, force_functorch=True), x, y).backward()
    assert_grad_samples(model, exact)


def test_samples_in_the_second_dimension():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.scale = nn.Embedding(9, 5), nn.Linear(5, 4), nn.PReLU(1)

        def forward(self, x):
            return self.scale(self.inner(self.table(x)))

    model, x = TimeFirst(), torch.randint(0, 9, (7, 3))

    def loss(m, x):
        return m(x).square().sum()

    exact = loop_over_samples(model, loss, x, batch_dim=1)
    loss(dpfast.GradSampleModule(model, batch_first=False, loss_reduction="sum"), x).backward()
    assert_grad_samples(model, exact)


def test_several_backwards_make_a_list_and_zero_grad_clears_it():
    model, x, y = example("mlp")
    wrapped = dpfast.GradSampleModule(model)
    mean_loss(wrapped, x, y).backward()
    first = model[0].weight.grad_sample
    mean_loss(wrapped, x[:2], y[:2]).backward()
    assert isinstance(model[0].weight.grad_sample, list)
    assert model[0].weight.grad_sample[0] is first
    assert model[0].weight.grad_sample[1].shape[0] == 2
    wrapped.zero_grad()
    assert model[0].weight.grad_sample is None and model[0].weight.grad is None
    wrapped.forbid_grad_accumulation()
    mean_loss(wrapped, x, y).backward()
    with pytest.raises(StateError, match="Poisson"):
        mean_loss(wrapped, x, y).backward()
    wrapped.allow_grad_accumulation()
    mean_loss(wrapped, x, y).backward()
    assert len(model[0].weight.grad_sample) == 2


def test_frozen_and_unfrozen_parameters():
    model, x, y = example("transformer")
    for p in model.parameters():
        p.requires_grad = False
    model.head.weight.requires_grad = True
    wrapped = dpfast.GradSampleModule(model)
    mean_loss(wrapped, x, y).backward()
    assert [n for n, p in model.named_parameters() if getattr(p, "grad_sample", None) is not None] == ["head.weight"]
    for p in model.parameters():
        p.requires_grad = True
    wrapped.zero_grad()
    exact = loop_over_samples(Transformer_like(model), sum_loss, x, y)
    mean_loss(wrapped, x, y).backward()
    assert_grad_samples(model, exact)


def Transformer_like(model):
    fresh = Transformer()
    fresh.load_state_dict(model.state_dict())
    return fresh


def test_to_standard_module_leaves_no_trace():
    model, x, y = example("transformer")
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    wrapped = dpfast.GradSampleModule(model)
    mean_loss(wrapped, x, y).backward()
    assert wrapped.to_standard_module() is model
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert type(module._parameters) is dict
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    dpfast.GradSampleModule(model)


def test_hooks_can_be_switched_off_and_removed():
    model, x, y = example("mlp")
    wrapped = dpfast.GradSampleModule(model)
    assert wrapped.hooks_enabled
    wrapped.disable_hooks()
    mean_loss(wrapped, x, y).backward()
    assert model[0].weight.grad_sample is None and model[0].weight.grad is not None
    wrapped.enable_hooks()
    mean_loss(wrapped, x, y).backward()
    assert model[0].weight.grad_sample is not None
    wrapped.remove_hooks()
    assert not wrapped.hooks_enabled
    wrapped.remove_hooks()
    wrapped.add_hooks(loss_reduction="sum")
    assert wrapped.hooks_enabled


def test_attributes_state_dict_copies_and_pickles():
    model, x, y = example("mlp")
    wrapped = dpfast.GradSampleModule(model)
    assert wrapped.append.__self__ is model
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = wrapped.nothing_of_this_name
    assert set(wrapped.state_dict()) == {f"_module.{k}" for k in model.state_dict()}
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        mean_loss(other, x, y).backward()
        assert model[0].weight.grad is None and model[0].weight.grad_sample is None
        mean_loss(wrapped, x, y).backward()
        assert torch.equal(other._module[0].weight.grad_sample, model[0].weight.grad_sample)
        wrapped.zero_grad()


def test_grad_sample_shares_no_memory_with_the_graph():
    layer = nn.Linear(3, 2)
    wrapped = dpfast.GradSampleModule(layer, loss_reduction="sum")
    x = torch.randn(4, 3, requires_grad=True)
    out = wrapped(x)
    out.retain_grad()
    out.sum().backward()
    layer.bias.grad_sample.fill_(7.0)
    assert (out.grad == 1.0).all()


def test_rearrange_and_capture():
    layer = nn.Linear(3, 2)
    wrapped = dpfast.GradSampleModule(layer)
    x, b = torch.randn(4, 5, 3), torch.randn(4, 5, 2)
    activations, backprops = wrapped.rearrange_grad_samples(
        module=layer,
        backprops=b.transpose(0, 1),
        loss_reduction="mean",
        batch_first=False,
        activations=[x.transpose(0, 1)],
    )
    assert torch.equal(activations[0], x) and torch.equal(backprops, b * 4)
    with pytest.raises(StateError, match="No activations detected for Linear"):
        wrapped.rearrange_grad_samples(module=layer, backprops=b, loss_reduction="mean", batch_first=True)
    got = wrapped.capture_backprops_hook(layer, (x,), (b,), "sum", True)
    assert torch.allclose(got[layer.weight], torch.einsum("ntp,ntd->npd", b, x), atol=1e-5)


def test_registered_samplers_are_used_and_listed():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    calls = []

    @dpfast.register_grad_sampler(Scale)
    def sampler(layer, activations, backprops):
        calls.append(type(activations[0]))
        return {layer.weight: activations[0] * backprops}

    try:
        assert dpfast.GradSampleModule.GRAD_SAMPLERS[Scale] is sampler
        assert nn.Linear in dpfast.GradSampleModule.GRAD_SAMPLERS and nn.Linear in dpfast.GradSampleModule.NORM_SAMPLERS
        model, x = Scale(), torch.randn(4, 3)
        dpfast.GradSampleModule(model, loss_reduction="sum")(x).sum().backward()
        assert calls == [torch.Tensor]
        assert torch.equal(model.weight.grad_sample, x)
        norms = dpfast.GradSampleModule.NORM_SAMPLERS[Scale](model, [x], torch.ones(4, 3))
        assert torch.allclose(norms[model.weight], x.norm(dim=1))
    finally:
        for table in (registry.RULES, registry.GRAD_SAMPLERS, registry.NORM_SAMPLERS):
            table.pop(Scale, None)
    with pytest.raises(InputError, match="not a class of nn"):
        dpfast.register_rule(nn.Linear(1, 1))


# --- bad input ---


def test_hooks_added_twice():
    model, x, y = example("mlp")
    wrapped = dpfast.GradSampleModule(model)
    for again in (lambda: dpfast.GradSampleModule(model), wrapped.add_hooks):
        with pytest.raises(ValueError, match=r"hooks twice.*0 \(Linear\)") as error:
            again()
        assert isinstance(error.value, dpfast.DpfastError)
    mean_loss(wrapped, x, y).backward()
    assert model[0].weight.grad_sample is not None


def test_loss_reduction():
    with pytest.raises(ValueError, match="'max'") as error:
        dpfast.GradSampleModule(Mlp(), loss_reduction="max")
    assert isinstance(error.value, dpfast.DpfastError)


@pytest.mark.parametrize(
    "bad", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_layers_that_mix_samples_are_refused(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(bad))
    with pytest.raises(NotImplementedError, match=rf"1\.0 \({type(bad).__name__}\)") as error:
        dpfast.GradSampleModule(model)
    assert isinstance(error.value, dpfast.DpfastError)
    with pytest.warns(DpfastWarning):
        assert len(dpfast.GradSampleModule.validate(model)) == 1
    assert not dpfast.GradSampleModule.is_supported(bad)
    assert dpfast.GradSampleModule.is_supported(model[0])
    model(torch.randn(3, 4, 2).mean(2)) if not isinstance(bad, nn.SyncBatchNorm | nn.InstanceNorm1d) else None
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_frozen_batch_norm_in_eval_mode_is_accepted():
    norm = nn.BatchNorm1d(4).eval().requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    dpfast.GradSampleModule(model)(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad_sample.shape == (3, 4, 4)


def test_statistics_of_an_instance_norm_that_is_frozen_and_in_eval_mode():
    """It keeps none then, and normalises by what it has, as a batch norm does."""
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval()
    assert not dpfast.GradSampleModule.is_supported(norm)
    norm.requires_grad_(False)
    norm.running_mean.add_(0.5)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), norm)
    x = torch.randn(4, 3, 6)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x, dtype=torch.float64)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    assert torch.allclose(model[0].weight.grad_sample.double(), exact["0.weight"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "max_norm"])
def test_embeddings_that_mix_samples_are_refused(option):
    table = nn.Embedding(4, 3, **{option: 1.0 if option == "max_norm" else True})
    with pytest.raises(UnsupportedModuleError, match=option):
        dpfast.GradSampleModule(table)


def test_output_that_is_not_a_tensor():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return str((x * self.weight).sum())

    model = nn.Sequential(Odd())
    assert isinstance(dpfast.GradSampleModule(model)(torch.ones(2, 3)), str)  # its weight is followed by itself
    wrapped = dpfast.GradSampleModule(nn.Sequential(Odd()), force_functorch=True)
    with pytest.raises(NotImplementedError, match=r"0 \(Odd\): its output is a str, not a tensor"):
        wrapped(torch.ones(2, 3))
    assert isinstance(model[0].weight, nn.Parameter)


def test_layers_that_see_different_batches():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, first=1):
            return self.a(x).sum() + self.b(x[first:]).sum()

    model = Two()
    wrapped = dpfast.GradSampleModule(model)
    with pytest.raises(InputError, match=r"b \(Linear\): dimension 0 of its output follows the batch, but is no"):
        wrapped(torch.ones(5, 3)).backward()
    assert model.a.weight.grad_sample is None
    wrapped(torch.ones(2, 3), first=0).backward()
    assert model.a.weight.grad_sample.shape == (2, 3, 3)


def test_random_layer_without_a_rule():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return F.dropout(x * self.weight, 0.5)

    with pytest.raises(UnsupportedModuleError, match=r"1 \(Noisy\).*Register a rule"):
        model = dpfast.GradSampleModule(nn.Sequential(nn.Linear(3, 3), Noisy()), force_functorch=True)
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(
    "call", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward(loss)], ids=["method", "function"]
)
@pytest.mark.parametrize("wrap", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_loss_that_is_not_scalar(wrap, call):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    wrapped = wrap(model)
    for loss in (wrapped(x).sum(1), wrapped(x[:0]).sum(1)):
        with pytest.raises(LossError, match=rf"shape \({len(loss)},\).*2 \(Linear\).*mean\(\)") as caught:
            call(loss)
        assert isinstance(caught.value, (dpfast.errors.DpfastError, ValueError))
        assert isinstance(caught.value, RuntimeError)  # as torch's own
    assert all(p.grad is None for p in model.parameters())
    wrapped(x).sum(1).mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs") as caught:
        call(nn.Linear(3, 2)(x).sum(1))  # no model of ours
    assert not isinstance(caught.value, LossError)


def test_loss_that_is_not_scalar_with_its_own_gradient_is_torchs_business():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    wrapped(x).backward(torch.ones(5, 2))
    grad_sample = model.weight.grad_sample
    wrapped.zero_grad()
    wrapped(x).sum().backward()
    assert torch.equal(model.weight.grad_sample, grad_sample)


@pytest.mark.parametrize("cls", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_a_loop_over_samples_of_a_wrapped_model(cls):
    """Its own hooks would clip in the loop, which would agree with whatever they do."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    loss = lambda m, x: m(x).square().sum()  # noqa: E731
    exact = loop_over_samples(model, loss, x)
    wrapped = cls(model)
    for given in (wrapped, model):
        with pytest.raises(InputError, match="the model is wrapped"):
            loop_over_samples(given, loss, x)
    again = loop_over_samples(copy.deepcopy(wrapped).to_standard_module(), loss, x)
    assert all(torch.equal(again[name], g) for name, g in exact.items())


def test_loss_that_is_not_scalar_where_we_are_handed_it():
    with pytest.raises(InputError, match=r"shape \(1,\), not that of a scalar"):
        loop_over_samples(nn.Linear(3, 2), lambda m, x: m(x).sum(1), torch.randn(5, 3))
