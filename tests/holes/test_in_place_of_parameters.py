"""Layers that hold something else in a parameter's place: a constant, or what is computed from other parameters."""

import copy

import pytest
import torch
from released import in_two_passes
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C, N = 0.1, 4


class First(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


LAYERS = {
    "linear": (lambda: nn.Linear(8, 3), ["weight", "bias"], (8,)),
    "layer norm": (lambda: nn.LayerNorm(8), ["weight", "bias"], (8,)),
    "rms norm": (lambda: nn.RMSNorm(8), ["weight"], (8,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), ["weight", "bias"], (4, 5)),
    "convolution": (lambda: nn.Conv1d(4, 3, 3), ["weight", "bias"], (4, 7)),
    "embedding": (lambda: nn.Embedding(10, 4), ["weight"], None),
    "lstm": (lambda: nn.LSTM(8, 3, batch_first=True), ["weight_hh_l0", "bias_ih_l0"], (5, 8)),
}
CASES = [(kind, name) for kind, (_, names, _) in LAYERS.items() for name in names]


def around(kind):
    """A model around the layer, the layer, and a batch."""
    make, _, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer = make()
    x = torch.randint(10, (N, 6)) if shape is None else torch.randn(N, *shape, dtype=torch.float64)
    model = nn.Sequential(First(layer) if kind == "lstm" else layer, nn.Tanh(), nn.LazyLinear(2))
    model(x if shape is None else x.float())
    return model.double(), layer, x


def losses(model, *batch):
    return torch.sin(3.0 * model(*batch)).flatten(1).sum(1)


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}, {name}" for kind, name in CASES])
def test_a_constant_in_a_parameters_place(kind, name, buffer):
    """The forward is the model's own, and gradients are right in every mode."""
    model, layer, x = around(kind)
    value = getattr(layer, name).detach() + 1.0
    delattr(layer, name)
    layer.register_buffer(name, value) if buffer else setattr(layer, name, value)
    with torch.no_grad():
        plain = model(x)
    exact = loop_over_samples(copy.deepcopy(model), lambda model, x: losses(model, x).sum(), x)
    expected = clipped_sum(exact, C)

    def is_its_own(output):  # to the bit, but for the order of sums in torch's recurrent layers
        return relative_error(output, plain) < 1e-15 if kind == "lstm" else torch.equal(output, plain)

    wrapped = GradSampleModule(model, loss_reduction="sum")
    output = wrapped(x)
    assert is_its_own(output)
    torch.sin(3.0 * output).sum().backward()
    for n, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[n]) < 1e-12
    model = wrapped.to_standard_module()
    model.zero_grad()

    for passes in (1, 2):
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", passes=passes)
        output = wrapped(x)
        assert is_its_own(output)
        found = torch.sin(3.0 * output).flatten(1).sum(1)
        in_two_passes(wrapped, found, "sum") if passes == 2 else found.sum().backward()
        assert (wrapped.get_clipping_coef() * norms_of(exact)).max() <= C * (1.0 + 1e-12)
        for n, p in model.named_parameters():
            assert relative_error(p.grad, expected[n]) < 1e-6
            p.grad = None
        model = wrapped.to_standard_module()

    compile_step(model, losses, max_grad_norm=C, batch_size=N, backend="eager")(x)
    for n, p in model.named_parameters():
        assert relative_error(p.grad, expected[n]) < 1e-6


def wrap_in_each(model):
    yield lambda: GradSampleModule(model)
    yield lambda: GradSampleModuleFastGradientClipping(model)
    yield lambda: GradSampleModuleFastGradientClipping(model, passes=2)
    yield lambda: compile_step(model, losses, max_grad_norm=C, batch_size=N, backend="eager")


COMPUTED = {
    "prune": lambda layer, name: prune.l1_unstructured(layer, name, 0.4),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding", "lstm"])
@pytest.mark.parametrize("how", COMPUTED)
def test_a_weight_computed_before_the_forward_is_refused_by_name(how, kind):
    """torch's older way is a hook in front of the layer's forward. Where nothing is trained of what it takes, it is a
    constant."""
    model, layer, x = around(kind)
    name = LAYERS[kind][1][0]
    COMPUTED[how](layer, name)
    for wrap in wrap_in_each(model):
        with pytest.raises(UnsupportedModuleError, match=rf"its {name} is made of {name}_.* parametrization"):
            wrap()
    with pytest.warns(DpfastWarning, match="is made of"):
        wrapped = GradSampleModule(model, strict=False)  # here it is said when the gradient comes
    with pytest.raises(UnsupportedModuleError, match=f"its {name} is made of {name}_"):
        losses(wrapped, x).sum().backward()
    model = wrapped.to_standard_module()
    model.zero_grad()

    for n, p in layer.named_parameters():
        p.requires_grad_(not n.startswith(f"{name}_"))
    wrapped = GradSampleModuleFastGradientClipping(model.eval(), max_grad_norm=C, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    mine = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model = wrapped.to_standard_module()
    trained, one_by_one = [p for p in model.parameters() if p.requires_grad], []
    with torch.backends.cudnn.flags(enabled=False):  # whose recurrent layers have no backward in evaluation
        for x_n in x.split(1):
            one_by_one.append(torch.autograd.grad(losses(model, x_n).sum(), trained))
    exact = {n: torch.stack([g[i] for g in one_by_one]) for i, n in enumerate(mine)}
    for n, total in clipped_sum(exact, C).items():
        assert relative_error(mine[n], total) < 1e-6


@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding"])
def test_a_weight_that_a_hook_of_the_user_s_makes(kind):
    """Others that run before a layer are none of our business, a parametrized one's either."""
    model, layer, x = around(kind)
    layer.register_forward_pre_hook(lambda layer, args: None)
    losses(GradSampleModuleFastGradientClipping(copy.deepcopy(model)), x).sum().backward()
    parametrized = copy.deepcopy(model)
    parametrize.register_parametrization(parametrized.get_submodule(where(model, layer)), "weight", nn.Tanh())
    losses(GradSampleModuleFastGradientClipping(parametrized), x).sum().backward()

    layer.free = nn.Parameter(layer.weight.detach().clone())
    del layer.weight
    layer.register_forward_pre_hook(lambda layer, args: setattr(layer, "weight", layer.free.tanh()))
    for wrap in wrap_in_each(model):
        with pytest.raises(UnsupportedModuleError, match=r"its weight is made of free .* parametrization.*freeze free"):
            wrap()
    layer.free.requires_grad_(False)
    losses(GradSampleModuleFastGradientClipping(model), x).sum().backward()


def where(model, layer):
    return next(name for name, module in model.named_modules() if module is layer)


class Masked(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("mask", (weight.abs() > weight.abs().median()).to(weight.dtype))

    def forward(self, weight):
        return weight * self.mask


REMEDIES = {
    "prune": lambda layer: parametrize.register_parametrization(layer, "weight", Masked(layer.weight)),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("how", REMEDIES)
def test_the_remedy(how):
    """A parametrization in its place has the gradients of a loop over samples."""
    model, layer, x = around("linear")
    REMEDIES[how](layer)
    model.eval()
    exact = loop_over_samples(copy.deepcopy(model), lambda model, x: losses(model, x).sum(), x)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-6
