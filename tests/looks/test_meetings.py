"""Parameters that a forward uses by itself, and weights made of others, meet samples in another order than the batch's:
right, where the forward that has them puts the samples back itself, or refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

N, T, D, C = 6, 5, 4, 1.0

PICK = {
    "x[order]": lambda x, order: x[order],
    "flip": lambda x, order: x.flip(0),
    "roll": lambda x, order: x.roll(1, 0),
    "as it is": lambda x, order: x,
}


class Meets(nn.Module):
    """Brings its samples in an order, does something, and brings them back."""

    def __init__(self, what, pick):
        super().__init__()
        self.first, self.head, self.tied = nn.Linear(D, D), nn.Linear(D, 3), nn.Linear(D, D, bias=False)
        self.w, self.scale = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.rand(D) + 0.5)
        self.pos, self.cls = nn.Parameter(torch.randn(1, T, D)), nn.Parameter(torch.zeros(1, 1, D))
        self.table, self.normed = nn.Embedding(T, D), weight_norm(nn.Linear(D, D))
        self.what, self.pick = what, pick

    def forward(self, x, lengths):
        h, numbers = torch.tanh(self.tied(self.first(x))), torch.arange(len(x))
        order = lengths.argsort(descending=True)
        h = WHAT[self.what](self, self.pick(h, order))
        back = self.pick(numbers, order).argsort()
        return self.head(h[back])


WHAT = {
    "a table is added": lambda m, h: h + m.pos,
    "in place": lambda m, h: h.clone().add_(m.pos),
    "F.linear": lambda m, h: F.linear(h, m.w),
    "@": lambda m, h: h @ m.w,
    "einsum": lambda m, h: torch.einsum("ntd,de->nte", h, m.w),
    "einsum with dots": lambda m, h: torch.einsum("...d,de->...e", h, m.w),
    "einsum with dots of its own": lambda m, h: torch.einsum("fd,...f->...fd", m.w, h).sum(-1),
    "einsum with dots in both": lambda m, h: torch.einsum("...d,...d->...d", m.w[0], h),
    "F.layer_norm": lambda m, h: F.layer_norm(h, (D,), m.scale),
    "class tokens": lambda m, h: torch.cat([m.cls.expand(len(h), -1, -1), h], 1).cumsum(1),
    "repeated": lambda m, h: torch.cat([m.cls.repeat(len(h), 1, 1), h], 1).cumsum(1),
    "F.linear, flat": lambda m, h: F.linear(h.reshape(-1, D), m.w).view_as(h),
    "added, flat": lambda m, h: (h.reshape(-1, D) + m.scale).view_as(h),
    "another layer's weight": lambda m, h: F.linear(h, m.tied.weight),
    "another layer's, flat": lambda m, h: F.linear(h.reshape(-1, D), m.tied.weight).view_as(h),
    "a weight made of others": lambda m, h: m.normed(h),
    "a layer's rows": lambda m, h: h + m.table(torch.arange(T)),
}


# What is another module's is not put back by this one's forward; rows that are followed are known.
REFUSED = {
    (what, pick)
    for what in (
        *("class tokens", "repeated", "another layer's weight", "another layer's, flat"),
        *("a weight made of others", "a layer's rows"),
    )
    for pick in PICK
    if pick != "as it is" and (pick != "x[order]" or what in ("class tokens", "repeated"))
}


def loss(model, x, lengths, weights):
    return (model(x, lengths).square().flatten(1).sum(1) * weights).sum()


def batch():
    torch.manual_seed(0)
    lengths, weights = torch.tensor([2, 7, 3, 6, 1, 4]), torch.tensor([5.0, 1.0, 3.0, 0.2, 20.0, 1.0])
    return torch.randn(N, T, D, dtype=torch.float64), lengths, weights.double()


@pytest.mark.parametrize("pick", PICK)
@pytest.mark.parametrize("what", WHAT)
def test_samples_in_an_order(what, pick):
    inputs, refused = batch(), (what, pick) in REFUSED
    plain = Meets(what, PICK[pick]).double()
    samples = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    clipping = GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=C, loss_reduction="sum")
    exact = loop_over_samples(plain, loss, *inputs)
    summed = clipped_sum(exact, C)
    for _ in range(2):
        for model in (samples, clipping):
            model.zero_grad()
            told = r"another order|depends on several samples|not its own|neither sample by sample"
            with pytest.raises(DpfastError, match=told) if refused else nullcontext():
                loss(model, *inputs).backward()
        for name, gradients in exact.items():
            if gradients.any() and not refused:
                assert relative_error(samples._module.get_parameter(name).grad_sample, gradients) <= 1e-5, name
                assert relative_error(clipping._module.get_parameter(name).grad, summed[name]) <= 1e-5, name


@pytest.mark.parametrize("what", ["another layer's weight", "a weight made of others", "a layer's rows"])
def test_the_error_names_the_layer(what):
    model = GradSampleModule(Meets(what, PICK["flip"]), loss_reduction="sum")
    x, lengths, weights = batch()
    with pytest.raises(DpfastError, match=r"(tied|normed|table) .*: .* stand in another order"):
        loss(model, x.float(), lengths, weights.float()).backward()
