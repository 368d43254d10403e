"""State spaces and filters of Fourier coefficients: complex numbers made of real parameters, which have no samples
until they meet them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import DpfastError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

T, D, H, C = 8, 6, 5, 0.3


class Kernel(nn.Module):
    """S4D's (Gu et al., 2022), (D, T); takes no tensor."""

    def __init__(self):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(D) - 3)
        self.c = nn.Parameter(torch.randn(D, H, 2))
        self.log_real = nn.Parameter(torch.full((D, H), 0.5).log())
        self.imag = nn.Parameter(math.pi * torch.arange(H).float().repeat(D, 1))

    def forward(self, length):
        a = -self.log_real.exp() + 1j * self.imag
        dt_a = a * self.log_dt.exp().unsqueeze(-1)
        c = torch.view_as_complex(self.c) * (dt_a.exp() - 1.0) / a
        powers = (dt_a.unsqueeze(-1) * torch.arange(length)).exp()
        return 2 * torch.einsum("hn,hnl->hl", c, powers).real


class S4D(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip, self.kernel = nn.Parameter(torch.randn(D)), Kernel()

    def forward(self, x):
        u, k = x.mT, self.kernel(T)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * T) * torch.fft.rfft(k, n=2 * T), n=2 * T)[..., :T]
        return (y + u * self.skip.unsqueeze(-1)).mT


class BothDirections(nn.Module):
    """A kernel forwards and backwards in time."""

    def __init__(self):
        super().__init__()
        self.kernel = Kernel()

    def forward(self, x):
        first, second = self.kernel(T).chunk(2)
        k = torch.cat([F.pad(first, (0, T)) + F.pad(second.flip(-1), (T, 0))] * 2)
        return torch.fft.irfft(torch.fft.rfft(x.mT, n=2 * T) * torch.fft.rfft(k), n=2 * T)[..., :T].mT


class LinearRecurrence(nn.Module):
    """LRU (Orvieto et al., 2023): a matrix of complex numbers is multiplied with samples."""

    def __init__(self):
        super().__init__()
        self.nu, self.theta = nn.Parameter(torch.rand(H)), nn.Parameter(torch.rand(H))
        self.b = nn.ParameterList([torch.randn(H, D) / 4 for _ in range(2)])
        self.c = nn.ParameterList([torch.randn(D, H) / 4 for _ in range(2)])

    def forward(self, x):
        turn = torch.complex(-self.nu.exp(), self.theta.exp()).exp()
        b = torch.complex(*self.b) * (1 - turn.abs() ** 2).sqrt().unsqueeze(-1)
        driven = x.to(b.dtype) @ b.T
        state, states = torch.zeros_like(driven[:, 0]), []
        for step in driven.unbind(1):
            state = turn * state + step
            states.append(state)
        return (torch.stack(states, 1) @ torch.complex(*self.c).T).real


class Spectrum(nn.Module):
    """A Fourier neural operator's (Li et al., 2021)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D, 3, 2) / 4)

    def forward(self, x):
        parts = torch.fft.rfft(x.mT)[:, :, :3]
        return torch.fft.irfft(torch.einsum("bix,iox->box", parts, torch.view_as_complex(self.weight)), n=T).mT


class Filter(nn.Module):
    """A global filter (GFNet, Rao et al., 2021)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(T // 2 + 1, D, 2) / 4)

    def forward(self, x):
        parts = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft(parts, n=T, dim=1, norm="ortho")


class OfTheBatch(S4D):
    """The spectrum of one sample has another's in it."""

    def forward(self, x):
        spectrum = torch.fft.rfft(x.mT, n=2 * T)
        y = (spectrum + spectrum.roll(1, 0)) * torch.fft.rfft(self.kernel(T), n=2 * T)
        return torch.fft.irfft(y, n=2 * T)[..., :T].mT


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(2, D), layer(), nn.Linear(D, 3)

    def forward(self, x):
        x = self.first(x)
        return self.head(torch.tanh(x + self.layer(x)).mean(1))


class Checkpointed(Net):
    def forward(self, x):
        x = self.first(x)
        return self.head(torch.tanh(x + checkpoint(self.layer, x, use_reentrant=False)).mean(1))


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def batch(n):
    return torch.randn(n, T, 2), torch.randint(3, (n,))


LAYERS = [S4D, BothDirections, LinearRecurrence, Spectrum, Filter]


@pytest.mark.parametrize("layer", LAYERS)
class TestLayer:
    def test_per_sample_gradients(self, layer):
        model = Net(layer)
        reference, wrapped = copy.deepcopy(model), dpfast.GradSampleModule(model, loss_reduction="sum")
        for n in (3, T, 1):  # T = N among them
            data = batch(n)
            losses(wrapped, *data).sum().backward()
            expected = loop_over_samples(reference, lambda *some: losses(*some).sum(), *data)
            for name, p in model.named_parameters():
                assert relative_error(p.grad_sample, expected[name]) < 1e-5, name
            wrapped.zero_grad()

    @pytest.mark.parametrize("net", [Net, Checkpointed])
    def test_clipped_sum(self, layer, net):
        model = net(layer)
        reference = copy.deepcopy(model)
        wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")
        for n in (3, T, 1):
            data = batch(n)
            losses(wrapped, *data).sum().backward()
            expected = clipped_sum(loop_over_samples(reference, lambda *some: losses(*some).sum(), *data), C)
            for name, p in model.named_parameters():
                assert relative_error(p.grad, expected[name]) < 1e-4, name
            wrapped.zero_grad()


def test_samples_that_meet_among_fourier_coefficients_are_refused():
    wrapped = dpfast.GradSampleModule(Net(OfTheBatch))
    with pytest.raises(DpfastError, match="sample"):
        losses(wrapped, *batch(4)).mean().backward()
    assert all(getattr(p, "grad_sample", None) is None for p in wrapped.parameters())


def test_complex_parameters_are_refused_with_the_remedy():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, dtype=torch.complex64))

        def forward(self, x):
            return (x * self.weight).real

    with pytest.raises(UnsupportedModuleError, match="view_as_complex"):
        losses(dpfast.GradSampleModule(Net(Own)), *batch(4)).mean().backward()
