"""Batches of two: what one sample holds alone is held by nobody else in a look. And experts that begin late."""

import pytest
import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError


class ByMaximum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, given=None):
        return self.last(torch.tanh(self.first(x)) / (x.abs().amax() if given is None else float(max(given))))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("made", [None, list, torch.tensor], ids=["of itself", "list", "tensor"])
def test_a_maximum_over_two_samples(made, largest):
    x, given = torch.randn(2, 4), [1.0, 1.0]
    x[largest] *= 8.0
    given[largest] = 8.0
    model = GradSampleModuleFastGradientClipping(ByMaximum(), max_grad_norm=1.0)
    with pytest.raises(UnsupportedModuleError, match="several samples"):
        model(x, *(() if made is None else (made(given),))).sum().backward()


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, rows):
        return self.layer(rows - rows.mean(0))


class Late(nn.Module):
    """Its last expert mixes what it gets."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Centred()])

    def forward(self, x, kinds):
        h = torch.tanh(self.first(x))
        found = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = kinds == i
            if len(rows.nonzero()):
                found[rows] = expert(h[rows])
        return self.last(found)


def test_an_expert_that_mixes_and_begins_in_the_second_forward():
    """Whose look exchanges all but one of four samples at once."""
    model = GradSampleModuleFastGradientClipping(Late(), max_grad_norm=1.0)
    model(torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0])).sum().backward()
    model.zero_grad()
    with pytest.raises(UnsupportedModuleError, match=r"not its own|several samples"):
        model(torch.randn(5, 4), torch.tensor([2, 0, 1, 2, 2])).sum().backward()
