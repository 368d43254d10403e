"""A forward that takes gradients by parameters itself, an inner step for each sample (ANIL): right, or an error that
says what is wanted."""

import pytest
import torch
from in_both_modes import C, check
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError, UnsupportedModuleError

D, H = 4, 6


class InnerStep(nn.Module):
    """Each sample's head is a step away from the weight, by its own inner loss."""

    def __init__(self, of_child, enabled):
        super().__init__()
        self.body, self.head = nn.Linear(D, H), nn.Linear(H, 2, bias=False)
        self.weight = None if of_child else nn.Parameter(torch.randn(H, 2) / 3)
        self.enabled = enabled

    def forward(self, x):
        if not self.enabled:
            return self.adapted(x)
        with torch.enable_grad():
            return self.adapted(x)

    def adapted(self, x):
        h = torch.tanh(self.body(x)).unsqueeze(1)
        weight = self.head.weight.t() if self.weight is None else self.weight
        weight = weight.expand(len(x), -1, -1)
        (step,) = torch.autograd.grad(self.inner(h.detach() @ weight).sum(), weight, create_graph=True)
        return (h @ (weight - 0.1 * step)).squeeze(1).sin()

    def inner(self, y):
        return y.square()


class StepOfAll(InnerStep):
    def inner(self, y):
        return (y - y.mean(0)).square()


class StepOfTheParameter(InnerStep):
    """One step for all samples, which meet in it."""

    def adapted(self, x):
        h = torch.tanh(self.body(x))
        (step,) = torch.autograd.grad((h.detach() @ self.weight).square().sum(), self.weight, create_graph=True)
        return h @ (self.weight - 0.1 * step)


MODES = [GradSampleModule, lambda m: GradSampleModuleFastGradientClipping(m, max_grad_norm=C)]


@pytest.mark.parametrize("n", [1, 3, H])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("of_child", [False, True])
def test_one_step_for_each_sample(of_child, enabled, n):
    torch.manual_seed(0)
    check(InnerStep(of_child, enabled), torch.randn(n, D), torch.randn(4, D))


@pytest.mark.parametrize("of_child", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_in_which_samples_meet_is_refused(mode, of_child):
    torch.manual_seed(0)
    with pytest.raises(DpfastError, match=r"several samples|not its own|brings samples together"):
        mode(StepOfAll(of_child, enabled=False))(torch.randn(3, D)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_the_error_says_what_is_wanted(mode):
    with pytest.raises(UnsupportedModuleError, match=r"StepOfTheParameter: its forward takes gradients itself"):
        mode(StepOfTheParameter(of_child=False, enabled=False))(torch.randn(3, D))
