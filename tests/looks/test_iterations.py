"""Forwards that go on until their numbers say that it is enough: looks at them end."""

import pytest
import torch
from in_both_modes import check
from torch import nn

from dpfast import GradSampleModule
from dpfast.errors import DpfastWarning, UnsupportedModuleError

D = 6


class FixedPoint(nn.Module):
    """Of each sample; one that has come to it stays as it is."""

    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        with torch.no_grad():
            self.step.weight.mul_(0.3)

    def forward(self, x):
        z, goes_on = torch.zeros_like(x), torch.ones(len(x), 1, dtype=torch.bool)
        with torch.no_grad():
            while bool(goes_on.any()):
                new = torch.tanh(self.step(z) + x)
                z, goes_on = torch.where(goes_on, new, z), goes_on & ((new - z).abs().amax(1, True) > 1e-6)
        return self.head(torch.tanh(self.step(z) + x))


class ByBatch(FixedPoint):
    """How far the whole batch is says when it ends."""

    def forward(self, x):
        z = torch.zeros_like(x)
        while True:
            last, z = z, torch.tanh(self.step(z) + x)
            if (z - last).norm() < 1e-6 * x.norm():
                return self.head(z)


class Halving(nn.Module):
    """Steps of a solver, each tried with half of its size until it is accurate: noise that is another in each call of a
    layer leaves none that is."""

    def __init__(self):
        super().__init__()
        self.of, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        z, at, size = x, 0.0, 0.5
        while at < 1.0:
            whole = z + size * self.of(z)
            half = z + 0.5 * size * self.of(z)
            twice = half + 0.5 * size * self.of(half)
            if (whole - twice).detach().norm(dim=1).max().item() > 1e-1:
                size = size / 2
                continue
            z, at = twice, at + size
        return self.head(z)


class Long(nn.Module):
    """A layer runs more often than any iteration is waited for."""

    def __init__(self, steps):
        super().__init__()
        self.cell, self.head, self.steps = nn.Linear(D, D), nn.Linear(D, 2), steps

    def forward(self, x):
        z = x
        for _ in range(self.steps):
            z = torch.tanh(self.cell(z) + x)
        return self.head(z)


def test_a_loop_until_all_samples_are_done(recwarn):
    """In a run without values the answer stayed the same, and the look did not end."""
    torch.manual_seed(0)
    check(FixedPoint(), torch.randn(4, D), torch.randn(3, D))
    assert not [w for w in recwarn if isinstance(w.message, DpfastWarning)]


@pytest.mark.parametrize("model", [ByBatch, Halving])
def test_an_end_that_the_batch_decides_is_refused(model):
    """With noise a solver took ever smaller steps."""
    torch.manual_seed(0)
    wrapped = GradSampleModule(model(), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError):
        wrapped(torch.randn(4, D) * torch.tensor([[30.0], [0.01], [1.0], [0.1]])).sum().backward()


def test_many_steps_that_are_as_many_without_noise(recwarn):
    torch.manual_seed(0)
    check(Long(260), torch.randn(3, D))
    assert not [w for w in recwarn if isinstance(w.message, DpfastWarning)]


class OnceMore(nn.Module):
    """Where a sample is large, each has another term."""

    def __init__(self):
        super().__init__()
        self.of = nn.Linear(D, 2)

    def forward(self, x):
        loss = self.of(x).square().sum()
        return loss + self.of(2.0 * x).sum() if bool((x > 9.0).any()) else loss


def test_a_turn_more_that_one_sample_gives_to_all():
    x = torch.randn(4, D)
    x[0, 0] = 10.0
    wrapped = GradSampleModule(OnceMore(), loss_reduction="sum")
    for _ in range(2):
        with pytest.raises(UnsupportedModuleError):
            wrapped(x).backward()
        x = x.roll(1, 0)
