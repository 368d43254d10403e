"""What a forward pass keeps of its samples, wherever that is and of whichever, and a later one uses."""

import collections

import numpy as np
import pytest
import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

H = 8


class Slots:
    __slots__ = ("mean",)

    def __init__(self):
        self.mean = torch.zeros(H)


class Net(nn.Module):
    def __init__(self, between, **kept):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(5, H), nn.Linear(H, 3), between
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.last(self.between(self, self.first(x).tanh()))


def mean(h):
    return h.detach().mean(0)


def in_an_array(m, h):
    out = h - torch.from_numpy(m.kept).to(h)
    m.kept = 0.9 * m.kept + 0.1 * mean(h).cpu().numpy()
    return out


def in_place_in_an_array(m, h):
    out = h - torch.from_numpy(m.kept.copy()).to(h)
    m.kept *= 0.9
    m.kept += 0.1 * mean(h).cpu().numpy()
    return out


def in_slots(m, h):
    out, m.kept.mean = h - m.kept.mean, mean(h)
    return out


def in_a_set(m, h):
    out = h * (1.0 + sum(m.kept))
    m.kept.add(float(mean(h).sum()))
    return out


def the_largest(m, h):
    out = h / (1.0 + m.kept)
    m.kept = float(h.detach().abs().max())
    return out


def of_the_last_sample(m, h):
    out, m.kept = h - m.kept, h[-1].detach()
    return out


def of_the_pass_before(m, h):
    out = h - m.kept.popleft()
    m.kept.append(mean(h))
    return out


ZEROS = np.zeros(H, dtype=np.float32)
KEEP = [
    (in_an_array, ZEROS),
    (in_place_in_an_array, ZEROS.copy()),
    (in_slots, Slots()),
    (in_a_set, set()),
    (the_largest, 0.0),
    (of_the_last_sample, torch.zeros(H)),
    (of_the_pass_before, collections.deque([torch.zeros(H), torch.zeros(H)])),
]


@pytest.mark.parametrize(("between", "kept"), KEEP, ids=lambda x: getattr(x, "__name__", ""))
def test_what_moves_later_sums_is_refused(between, kept):
    torch.manual_seed(0)
    model = GradSampleModuleFastGradientClipping(Net(between, kept=kept), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"^Net: what a forward pass keeps .*\(kept.*Keep nothing"):
        model(torch.randn(4, 5))


def counts_and_records(m, h):
    m.steps += 1
    m.array[m.steps % 4] = float(h.detach().max())
    m.largest, m.seen.mean = max(m.largest, float(h.detach().abs().max())), mean(h)
    m.names.add(m.steps)
    return h * torch.from_numpy(m.scale).to(h)


def test_what_moves_none_is_right():
    torch.manual_seed(0)
    kept = {"steps": 0, "array": ZEROS.copy(), "largest": 0.0, "seen": Slots(), "names": set(), "scale": ZEROS + 2.0}
    net, x = Net(counts_and_records, **kept), torch.randn(4, 5)
    exact = norms_of(loop_over_samples(net, lambda m, x: m(x).square().sum(), x))
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    for _ in range(3):
        model(x).square().sum().backward()
        assert relative_error(model.get_norm_sample(), exact) <= 1e-5
        model.zero_grad()
