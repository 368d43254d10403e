"""Models whose forward asks autograd for gradients itself: looks run them as training does."""

import warnings

import pytest
import torch
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError, DpfastWarning
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.2


class Decoder(nn.Module):
    """Latents are found by steps of gradient descent, one of each sample, without ``torch.enable_grad``."""

    def __init__(self, inner=lambda y, x: (y - x).square().sum(), outer=lambda y: y):
        super().__init__()
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.inner, self.outer = inner, outer

    def forward(self, x):
        z = torch.zeros(len(x), 3, dtype=x.dtype)
        for _ in range(3):
            z = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.inner(self.decode(z), x), z)
            z = z - 0.1 * g
        return self.outer(self.decode(z.detach()))


class Adapted(nn.Module):
    """Takes a step on parameters of its own for each sample, as MAML, and keeps its graph."""

    def __init__(self, outer=lambda y: y):
        super().__init__()
        self.w, self.b, self.outer = nn.Parameter(0.5 * torch.randn(6, 4)), nn.Parameter(torch.zeros(6)), outer

    def forward(self, x):
        own = [p.expand(len(x), *p.shape) for p in (self.w, self.b)]
        y = (x[:, None] @ own[0].mT)[:, 0] + own[1]
        grads = torch.autograd.grad(y.tanh().square().sum(), own, create_graph=True)
        w, b = (p - 0.1 * g for p, g in zip(own, grads, strict=True))
        return self.outer((x[:, None] @ w.mT)[:, 0] + b)


class ReadsValues(Decoder):
    """So it does not run on fake tensors."""

    def forward(self, x):
        return super().forward(x) * (1.0 if float(x.abs().sum()) >= 0.0 else 2.0)


class Sensitive(nn.Module):
    """Weights features by how an energy changes with them, as constants."""

    def __init__(self):
        super().__init__()
        self.lin, self.energy, self.head = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x):
        h = self.lin(x)
        return self.head(h * torch.autograd.grad(self.energy(h.tanh()).sum(), h, retain_graph=True)[0])


def energy_of(m, x):
    return m(x).square().sum()


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("make", [Decoder, Adapted, ReadsValues, Sensitive])
def test_they_are_right_without_a_warning(make, n):
    model, x = make(), torch.randn(n, 4)
    exact = loop_over_samples(model, energy_of, x)
    for wrapper, options in ((GradSampleModuleFastGradientClipping, {"max_grad_norm": C}), (GradSampleModule, {})):
        wrapped = wrapper(make(), loss_reduction="sum", **options)
        wrapped._module.load_state_dict(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error", DpfastWarning)
            for _ in range(2):  # looks of both kinds
                wrapped.zero_grad()
                energy_of(wrapped, x).backward()
        own = dict(wrapped._module.named_parameters())
        if options:
            assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
            for name, g in clipped_sum(exact, C).items():
                assert relative_error(own[name].grad, g) <= 1e-4, name
        else:
            for name, g in exact.items():
                found = own[name].grad_sample
                assert relative_error(found, g) <= 1e-4 if g.any() else found is None or not found.any(), name


def centred(y):
    return y - y.mean(0)


MIXING = {
    "behind it": lambda: Decoder(outer=centred),
    "in the inner loss": lambda: Decoder(lambda y, x: (y - x).mean(0).square().sum()),
    "by another's target": lambda: Decoder(lambda y, x: (y - x.roll(1, 0)).square().sum()),
    "adapted": lambda: Adapted(centred),
    "read on data": lambda: ReadsValues(lambda y, x: (y - x).mean(0).square().sum()),
}


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_in_them_are_refused(name, n):
    wrapped = GradSampleModuleFastGradientClipping(MIXING[name](), loss_reduction="sum")
    with pytest.raises(DpfastError, match="sample"):
        energy_of(wrapped, torch.randn(n, 4)).backward()


class Keeps(Decoder):
    """Begins with the mean of what the last pass has found."""

    def __init__(self):
        super().__init__()
        self.start = nn.Buffer(torch.zeros(3))

    def forward(self, x):
        z = self.start.expand(len(x), 3)
        for _ in range(2):
            z = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.inner(self.decode(z), x), z)
            z = z - 0.1 * g
        self.start = z.detach().mean(0)
        return self.decode(z.detach())


def test_what_they_keep_of_samples_is_refused():
    wrapped = GradSampleModuleFastGradientClipping(Keeps(), loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"keeps of its samples \(start\)"):
        energy_of(wrapped, torch.randn(5, 4))


class StepsWithin(nn.Module):
    """Calls ``backward`` in its forward, for the gradient of a latent."""

    def __init__(self):
        super().__init__()
        self.decode, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        z = torch.zeros(len(x), 3, dtype=x.dtype).requires_grad_()
        weight = self.decode.weight.detach()
        (z @ weight.T - x).square().sum().backward()
        return self.head(self.decode(z.detach() - 0.1 * z.grad))


def test_looks_leave_no_gradient_of_theirs():
    model, x = StepsWithin(), torch.randn(4, 4)
    exact = loop_over_samples(model, energy_of, x)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        loss = energy_of(wrapped, x)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    for name, g in exact.items():
        assert relative_error(model.get_parameter(name).grad_sample, g) <= 1e-5, name
