"""A forward of one's own that writes to its parameters, or to what it makes of them alone, is refused by name: what was
used before the write, and other names of it, would have had the gradients of what came after, or none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError


def _accumulated(m, x):
    total = m.b.clone()
    found = []
    for _ in range(2):
        found.append(x + total)
        total += m.b
    return sum(found)


def _written_behind_a_use(m, x):
    w = m.w * 1.0
    y = F.linear(x, w)
    w.mul_(3.0)
    return y


def _row(m, x):
    w = m.w * 1.0
    w[0] = m.b
    return F.linear(x, w)


def _diagonal(m, x):
    w = m.w * 1.0
    w.diagonal().copy_(m.b)
    return F.linear(x, w)


def _other_name(m, x):
    w = m.w * 1.0
    view = w.t()
    w.mul_(m.b)
    return x @ view


def _by_keyword(m, x):
    w = m.w * 1.0
    torch.relu_(input=w)
    return F.linear(x, w)


def _out(m, x):
    w = m.w * 1.0
    return F.linear(x, torch.add(w.detach(), m.b, out=w))


def _data(m, x):
    m.w.data = torch.renorm(m.w.data, 2, 0, 0.5)
    return F.linear(x, m.w)


def _frozen_for_a_use(m, x):
    m.w.requires_grad_(False)
    y = F.linear(x, m.w)
    m.w.requires_grad_(True)
    return y


def _relu(m, x):
    w = m.w * 1.0
    y = F.linear(x, w)
    return y + F.linear(x, F.relu(w, inplace=True))


class Own(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "forward",
    [
        _accumulated,
        _written_behind_a_use,
        _row,
        _diagonal,
        _other_name,
        _by_keyword,
        _out,
        _data,
        _frozen_for_a_use,
        _relu,
    ],
)
def test_refused(forward, passes):
    torch.manual_seed(0)
    net = Own(forward)
    before = [p.detach().clone() for p in net.parameters()]
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, passes=passes)
    with pytest.raises((UnsupportedModuleError, RuntimeError), match=r"Own: '.*' writes to a parameter|out=.*grad"):
        model(torch.randn(3, 4)).square().sum(1).mean().backward()
    assert all(torch.equal(p, was) and p.requires_grad for p, was in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_without_gradients_it_goes_on():
    """What is evaluated is nobody's sum."""
    torch.manual_seed(0)
    net, x = Own(_row), torch.randn(3, 4)
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0)
    with torch.no_grad():
        assert torch.equal(model(x), net(x))
