"""Samples that meet in the backward pass alone: a forward's rows part, and gradients do not."""

import pytest
import torch
from own_backwards import BatchMean
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, T = 6, 5


class StraightThrough(torch.autograd.Function):
    """Rounds; lets the gradient through where a value is below the batch's mean."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x - x.mean()).sigmoid()


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.flatten(1).norm(dim=1).clamp(min=1.0).view(-1, *[1] * (grad.dim() - 1))


def hooked(hook):
    def between(h):
        h.register_hook(hook)
        return h

    return between


class Net(nn.Module):
    """Layers with something between them that only a backward pass sees."""

    def __init__(self, between, heads=1):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(D, 8), nn.Linear(8, 7), nn.Linear(7, 3)
        self.between = between

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(self.between(h)))
        return self.third(h)


def module_hook(model):
    model.second.register_full_backward_hook(lambda module, grads, _: (grads[0] / grads[0].norm(),))
    return model


MIXING = {
    "normalised": lambda: Net(hooked(lambda g: g / g.norm())),
    "clipped together": lambda: Net(hooked(lambda g: g * (0.001 / g.norm()).clamp(max=1.0))),
    "less the mean": lambda: Net(BatchMean.apply),
    "straight through": lambda: Net(StraightThrough.apply),
    "a module's hook": lambda: module_hook(Net(nn.Identity())),
    "in a checkpoint": lambda: Net(lambda h: checkpoint(BatchMean.apply, h, use_reentrant=False)),
}

FINE = {
    "scaled": lambda: Net(hooked(lambda g: 0.5 * g)),
    "each clipped": lambda: Net(Clamped.apply),
    "entries clipped": lambda: Net(hooked(lambda g: g.clamp(-0.1, 0.1))),
    "checkpoint": lambda: Net(lambda h: checkpoint(torch.sin, h, use_reentrant=False)),
    "reentrant checkpoint": lambda: Net(lambda h: checkpoint(torch.sin, h, use_reentrant=True)),
}


@pytest.mark.parametrize("shape", [(4, D), (4, T, D), (D, D, D), (2, 3, D)], ids=str)
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_samples_that_meet_in_the_backward_pass_are_refused_by_name(name, shape, wrapper):
    torch.manual_seed(0)
    model = MIXING[name]()
    wrapped = wrapper(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"^first \(Linear\): .* meet in the backward pass"):
        wrapped(torch.randn(shape)).square().sum().backward()
    assert model.first.weight.grad is None
    assert getattr(model.first.weight, "grad_sample", None) is None


class OnItsOutput(Net):
    """A hook on the first layer's own output, behind which is no layer more that would see what came of it."""

    def __init__(self, hook, in_place=None):
        super().__init__(nn.Identity())
        self.hook, self.in_place = hook, in_place

    def forward(self, x):
        h = self.first(x)
        if self.in_place == "before":
            h.relu_()
        if h.requires_grad:
            h.register_hook(self.hook)
        if self.in_place == "after":
            h.relu_()
        return self.third(torch.tanh(self.second(torch.tanh(h))))


@pytest.mark.parametrize("in_place", [None, "before", "after"])
def test_hooks_on_a_layers_own_output_that_mix_are_refused(in_place):
    torch.manual_seed(0)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(OnItsOutput(lambda g: g + g.mean(0), in_place))
    with pytest.raises(UnsupportedModuleError, match=r"^first \(Linear\): .* meet in the backward pass"):
        wrapped(torch.randn(4, D)).square().sum().backward()


@pytest.mark.parametrize("name", FINE)
def test_what_looks_at_each_sample_is_right(name):
    torch.manual_seed(0)
    model, x = FINE[name](), torch.randn(4, T, D)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


class Reversible(torch.autograd.Function):
    """A backward pass of its own inside, as in reversible layers."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


def test_a_look_leaves_no_gradients_and_calls_no_hooks_of_parameters():
    called = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(D, 8), nn.Linear(8, 8)

        def forward(self, x):
            return Reversible.apply(self.first(x), self.inner)

    model = Model()
    for p in model.parameters():
        p.register_hook(lambda g: called.append(1))
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")  # the other refuses hooks on parameters
    before = torch.get_rng_state()
    wrapped(torch.randn(4, D, generator=torch.Generator().manual_seed(0)))
    assert not called and all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


class TransposedNorm(nn.Module):
    """As xlstm's: it gives what it has transposed as it came, and who has called it asks for the strides."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (nn.functional.layer_norm(x.transpose(1, 2), (4,)) * self.weight).transpose(1, 2)


class ViewsWhatANormGave(nn.Module):
    def __init__(self, meet):
        super().__init__()
        self.norm, self.last, self.meet = TransposedNorm(), nn.Linear(8, 3), meet

    def forward(self, x):  # (N, T, 8)
        n, t, _ = x.shape
        h = self.norm(x.reshape(n, t, 2, 4).transpose(1, 2)).transpose(1, 2).view(n, t, 8)
        if self.meet and h.requires_grad:
            h.register_hook(lambda grad: grad - grad.mean(0))
        return self.last(h)


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("meet", [False, True])
def test_a_look_gives_outputs_with_the_strides_that_they_have(meet):
    """With noise they were contiguous: the model's view failed, and the look was left out, with a warning."""
    torch.manual_seed(0)
    net, x = ViewsWhatANormGave(meet), torch.randn(4, T, 8)
    exact = loop_over_samples(net, lambda m, x: m(x).sin().sum(), x)
    model = dpfast.GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    if meet:
        with pytest.raises(UnsupportedModuleError, match=r"norm \(TransposedNorm\)"):
            model(x).sin().sum().backward()
        return
    model(x).sin().sum().backward()
    assert relative_error(model.get_norm_sample(), norms_of(exact)) <= 1e-5
