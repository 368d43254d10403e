"""Parameters that cannot be trained privately, or with hooks that would see nothing, are refused when they are seen."""

import copy

import pytest
import torch
from released import in_two_passes
from torch import nn

from dpfast import (
    ConstantFlatClipper,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    PerSampleGradientClipper,
    compile_step,
)
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C, N, D = 0.1, 4, 8


def losses(model, x):
    return torch.sin(3.0 * model(x)).sum(1)


FAST = {
    "one pass": lambda model: GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum"),
    "two passes": lambda model: GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=2),
    "compile_step": lambda model: compile_step(model, losses, max_grad_norm=C, batch_size=N, backend="eager"),
}
ALL = {
    **FAST,
    "grad_sample": lambda model: GradSampleModule(model, loss_reduction="sum"),
    "not strict": lambda model: GradSampleModule(model, strict=False),
    "clipper": lambda model: PerSampleGradientClipper(model, ConstantFlatClipper(C)),
}


class Spectral(nn.Module):
    """One layer of a Fourier neural operator, with weights that are complex, or real numbers viewed so."""

    def __init__(self, *, real, bins=D // 2 + 1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(bins, 2) if real else torch.randn(bins, dtype=torch.cfloat))

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=D)


def of_fourier(*, real):
    torch.manual_seed(0)
    return nn.Sequential(Spectral(real=real), nn.Linear(D, 2))


def is_as_before(model):
    """Nothing is left on it: a plain backward pass reaches every parameter."""
    losses(model, torch.randn(N, D)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", ALL)
def test_trainable_complex_parameters(mode):
    model = of_fourier(real=False)
    with pytest.raises(UnsupportedModuleError, match=r"0\.weight \(5,\) is torch.complex64.*\(5, 2\).*view_as_complex"):
        ALL[mode](model)
    assert is_as_before(model)
    with pytest.raises(UnsupportedModuleError, match=r"weight \(3, 2\) is torch.complex128"):
        ALL[mode](nn.Linear(2, 3, dtype=torch.complex128))


def test_a_complex_parameter_that_is_trained_later():
    model = of_fourier(real=False)
    model[0].weight.requires_grad_(False)
    plain, wrapped, x = copy.deepcopy(model), FAST["one pass"](model), torch.randn(N, D)
    losses(wrapped, x).sum().backward()
    for n, x_n in enumerate(x.split(1)):
        exact = torch.autograd.grad(losses(plain, x_n).sum(), [plain[1].weight, plain[1].bias])
        assert relative_error(wrapped.get_norm_sample()[n], torch.cat([g.flatten() for g in exact]).norm()) < 1e-5
    model[0].weight.requires_grad_()
    with pytest.raises(UnsupportedModuleError, match=r"0\.weight \(5,\) is torch.complex64"):
        wrapped(x)


@pytest.mark.parametrize("mode", ["one pass", "two passes", "grad_sample"])
def test_the_remedy_for_complex_parameters(mode):
    """Real numbers that are viewed as complex ones have the gradients of a loop over samples."""
    model, x = of_fourier(real=True).double(), torch.randn(N, D, dtype=torch.float64)
    exact = loop_over_samples(copy.deepcopy(model), lambda model, x: losses(model, x).sum(), x)
    expected = exact if mode == "grad_sample" else clipped_sum(exact, C)
    wrapped = ALL[mode](model)
    found = losses(wrapped, x)
    in_two_passes(wrapped, found) if mode == "two passes" else found.sum().backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample if mode == "grad_sample" else p.grad, expected[name]) < 1e-6


@pytest.mark.parametrize("mode", FAST)
def test_hooks_on_parameters(mode):
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    handle = model[2].weight.register_hook(lambda g: g * 0.5)
    with pytest.raises(UnsupportedModuleError, match=r"2\.weight \(2, 6\) has a hook"):
        FAST[mode](model)
    assert is_as_before(model)
    handle.remove()
    model.zero_grad()
    wrapped, x = FAST[mode](model), torch.randn(N, D)
    handle = model[0].bias.register_hook(lambda g: g * 0.5)
    with pytest.raises(UnsupportedModuleError, match=r"0\.bias \(6,\) has a hook"):
        wrapped(x)
    handle.remove()
    wrapped(x)


@pytest.mark.parametrize("mode", FAST)
def test_hooks_that_are_called_once_gradients_are_there(mode):
    """An optimizer in the backward pass stepped with None, or with the sum of the pass before, without noise."""
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        UnsupportedModuleError, match=r"2\.weight \(2, 6\) has a hook \(register_post_accumulate_grad_hook"
    ):
        FAST[mode](model)
    assert is_as_before(model)
    handle.remove()
    model.zero_grad()
    wrapped, x = FAST[mode](model), torch.randn(N, D)
    handle = model[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedModuleError, match=r"0\.bias \(6,\) has a hook \(register_post_accumulate"):
        wrapped(x)
    handle.remove()
    wrapped(x)


def test_guards_of_another_wrapped_model_are_no_hooks():
    """Two models with a parameter in common."""
    first, second = nn.Linear(D, 2), nn.Linear(D, 2)
    second.weight = first.weight
    x = torch.randn(N, D)
    for wrapped in [FAST["one pass"](model) for model in (first, second)]:
        assert wrapped(x).shape == (N, 2)
