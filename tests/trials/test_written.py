"""Forwards that write to parameters of their own: looks, which run copies on the same parameters, write nothing."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning
from dpfast.taps.written import ParameterWritten, Unwritten, is_written
from dpfast.testing import clipped_sum, loop_over_samples

N, D, P, C = 6, 5, 4, 0.5


class Teacher(nn.Module):
    """An average over steps of a layer's weights, as BYOL, MoCo v3 and DINO have it, updated in each forward."""

    def __init__(self, used, update):
        super().__init__()
        self.online, self.teacher = nn.Linear(D, P), nn.Linear(D, P).requires_grad_(False)
        self.used, self.update = used, update

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.update(list(self.teacher.parameters()), list(self.online.parameters()))
        y = self.online(x)
        return y - self.teacher(x) if self.used else y


def by_one(teacher, online):
    for a, b in zip(teacher, online, strict=True):
        a.mul_(0.9).add_(b, alpha=0.1)


def by_data(teacher, online):
    for a, b in zip(teacher, online, strict=True):
        a.data.copy_(0.9 * a.data + 0.1 * b.data)


def by_foreach(teacher, online):
    torch._foreach_lerp_(teacher, online, 0.1)


@pytest.mark.parametrize("update", [by_one, by_data, by_foreach])
@pytest.mark.parametrize("used", [False, True])
def test_a_teacher_is_updated_once_a_step(used, update):
    torch.manual_seed(0)
    net = Teacher(used, update)
    plain = copy.deepcopy(net)
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum")
    for _ in range(10):
        x = torch.randn(N, D)
        plain(x)
        exact = loop_over_samples(copy.deepcopy(plain).eval(), lambda m, x: m(x).square().sum(), x)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", DpfastWarning)
            model(x).square().sum(1).sum().backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        for name, g in clipped_sum(exact, C).items():
            torch.testing.assert_close(net.get_parameter(name).grad.double(), g.double(), rtol=1e-5, atol=1e-6)


class ScaledOnce(nn.Module):
    """Weights that the first call scales, of whatever shape comes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, P)
        self.register_buffer("done", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.done:
            self.layer.weight.data.mul_(x.shape[1] ** -0.5)
            self.done.fill_(True)
        return self.layer(x)


@pytest.mark.parametrize("mode", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_weights_are_scaled_once(mode):
    torch.manual_seed(0)
    net, x = ScaledOnce(), torch.randn(N, D)
    plain = copy.deepcopy(net)
    model = mode(net)
    for _ in range(3):
        plain(x)
        model(x).square().sum(1).mean().backward()
        assert torch.equal(net.layer.weight, plain.layer.weight)


def test_a_write_does_not_happen():
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for write in (one.data.zero_, lambda: torch.add(one.detach(), 1.0, out=one.detach()[:]), one.detach()[:1].zero_):
        with pytest.raises(ParameterWritten), Unwritten([(one, one)]):
            write()
    assert one.tolist() == other.tolist() == [1.0] * 3
    with Unwritten([(one, one)]), torch.no_grad():
        other.add_(one)
    assert is_written(one) and not is_written(other)
