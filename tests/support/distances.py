"""A layer without a rule, in a model, and steps of that compared with a loop over samples."""

import contextlib
import copy

import torch
from torch import nn

import dpfast
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C = 1.0
CHANGED = r"m \(Distances\): .* gave another output when it was run again in the backward pass"


class Distances(nn.Module):
    """To the rows of a parameter, which no function that dpfast knows comes to."""

    def __init__(self, forward=lambda self, distances: distances * self.scale):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("tau", torch.ones(()))
        self.scale, self.count, self.last, self.all = 1.0, 0, None, []
        self.then = forward

    @contextlib.contextmanager
    def scaled(self, scale):
        before, self.scale = self.scale, scale
        yield
        self.scale = before

    def forward(self, x):
        return self.then(self, torch.cdist(x, self.rows))


class Model(nn.Module):
    def __init__(self, layer, after=lambda x: x):
        super().__init__()
        self.first, self.m, self.after = nn.Linear(5, 5), layer, after

    def forward(self, x):
        return self.after(self.m(self.first(x)))


MODES = {
    "one pass": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, loss_reduction="sum"),
    "grad_sample": lambda m: dpfast.GradSampleModule(m, loss_reduction="sum"),
}


def wrapped_with_plain(mode, model):
    """Which keeps a copy that is not wrapped."""
    plain = copy.deepcopy(model)
    wrapped = mode(model)
    vars(wrapped)["plain"] = plain
    return wrapped


def inputs(n=4):
    return torch.randn(n, 5)


def loss_of(model, x):
    return model(x).sin().sum()


def step(wrapped, x):
    """One step, whose gradients are those of a loop over samples."""
    wrapped.plain.load_state_dict(wrapped._module.state_dict())
    wrapped.plain.m.scale = wrapped._module.m.scale
    exact = loop_over_samples(wrapped.plain, loss_of, x)
    wrapped.zero_grad()
    loss_of(wrapped, x).backward()
    per_sample = type(wrapped) is dpfast.GradSampleModule
    exact = exact if per_sample else clipped_sum(exact, C)
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad_sample if per_sample else p.grad, exact[name]) < 1e-4, name
