"""What a forward pass keeps and no later one uses: nothing is to be said of it."""

import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error


class Net(nn.Module):
    """Keeps something of each pass; ``between`` says what, and what goes on."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(5, 8), nn.Linear(8, 3), between
        self.calls, self.kept, self.before = 0, None, None

    def forward(self, x):
        self.calls += 1
        return self.last(self.between(self, self.first(x).tanh()))


def the_one_before(m, h):
    m.before, m.kept = m.kept, h
    return h


def the_last_two(m, h):
    m.kept = [*(m.kept or []), h][-2:]
    return h


def a_distribution(m, h):
    m.kept = Normal(h, 1.0)
    return h


def an_object(m, h):
    m.kept = types.SimpleNamespace(hidden=h, names=["h"])
    return h


def a_large_number(m, h):
    m.kept = 2**63 + m.calls
    return h


def reentrant(m, h):
    return checkpoint(torch.sin, h, use_reentrant=True)


BY_THE_WAY = [the_one_before, the_last_two, a_distribution, an_object, a_large_number, reentrant]


@pytest.mark.parametrize("between", BY_THE_WAY, ids=lambda f: f.__name__)
def test_nothing_is_said_of_what_no_later_pass_uses(between):
    net = Net(between)
    reference = Net(between)
    reference.load_state_dict(net.state_dict())
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        for _ in range(9):  # looked at in the first, the second and the eighth
            x = torch.randn(4, 5)
            model(x).square().sum().backward()
            expected = norms_of(loop_over_samples(reference, lambda m, x: m(x).square().sum(), x))
            assert relative_error(model.per_sample_gradient_norms, expected) < 1e-5
    assert net.calls == 9


def test_a_run_id_in_the_output_is_compared_as_a_number():
    class Told(Net):
        def forward(self, x):
            return {"y": super().forward(x), "run": 2**63 + 5}

    model = GradSampleModuleFastGradientClipping(Told(lambda m, h: h), loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        for _ in range(2):
            model(torch.randn(4, 5))["y"].square().sum().backward()


def weighs_gradients(m, h):
    """Of a reentrant checkpoint, by what the pass before has left."""
    weight = 0.0 if m.kept is None else m.kept
    m.kept = h.detach().mean(0)
    h = checkpoint(torch.sin, h, use_reentrant=True)
    return h + weight * (h - h.detach())


def test_a_gradient_behind_a_reentrant_checkpoint_is_compared():
    x = torch.randn(4, 5, requires_grad=True)
    model = GradSampleModuleFastGradientClipping(Net(weighs_gradients), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"what a forward pass keeps of its samples \(.*kept\)"):
        for _ in range(2):
            model(x).square().sum().backward()
    assert x.grad is None
