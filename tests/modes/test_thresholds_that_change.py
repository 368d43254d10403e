"""A clipper of one's own whose thresholds are not those of a moment ago."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast.modes import held_by
from dpfast.modes.clippers import NormClipper


class Decaying(NormClipper):
    """Other thresholds each time that they are read."""

    def __init__(self, is_per_layer):
        self.is_per_layer, self.threshold, self.read = is_per_layer, 64.0, []

    @property
    def thresholds(self):
        self.threshold /= 2
        self.read.append(torch.full((2 if self.is_per_layer else 1,), self.threshold))
        return self.read[-1]

    def calc_clipping_factors(self, norms):
        return [torch.full_like(norm, 1e6) for norm in norms]


@pytest.mark.parametrize("is_per_layer", [False, True])
def test_the_sensitivity_is_of_the_thresholds_that_were_clipped_to(is_per_layer):
    """And not of those that are there once the sum is: the noise would be too small."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    wrapped.norm_clipper = Decaying(is_per_layer)
    for _ in range(2):
        wrapped(torch.ones(1, 3)).sum().backward()
        moved = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        sensitivity = held_by(model.parameters()).sensitivity
        assert moved <= sensitivity * (1 + 1e-6)
        assert sensitivity in [float(x.double().norm()) for x in wrapped.norm_clipper.read]  # not kept for ever
        wrapped.zero_grad()
        wrapped.norm_clipper.read.clear()
    model = nn.Linear(3, 2)
    clipper = dpfast.PerSampleGradientClipper(model, Decaying(is_per_layer), loss_reduction="sum")
    model(torch.ones(1, 3)).sum().backward()
    clipper.clip_and_accumulate()
    sensitivities, _ = clipper.pre_step()
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() <= sensitivities[0] * (1 + 1e-6)
