"""Losses in which samples meet so little, or so hidden, that their values hardly show it."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.compiled import step as steps
from dpfast.compiled.apart import check_apart
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

N, C = 8, 0.1


class Net(nn.Module):
    """Gives what it finds, and how."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(5, 7), nn.Linear(7, 10), nn.Dropout(0.1)

    def forward(self, x):
        h = self.drop(self.a(x).tanh())
        return self.b(h), h


def made(losses, **options):
    torch.manual_seed(0)
    net = Net().eval()
    options = {"max_grad_norm": C, "batch_size": N, "backend": "eager", **options}
    return net, dpfast.compile_step(net, losses, **options), (torch.randn(N, 5), torch.randint(0, 10, (N,)))


def covariance(h):
    z = h - h.mean(0)
    c = z.t() @ z / len(h)
    return (c - c.diag().diag()).pow(2).sum()


def plain(model, x, y):
    output, h = model(x)
    return F.cross_entropy(output, y, reduction="none") + h.square().sum(1)


def little(model, x, y):
    return plain(model, x, y) + 1e-4 * covariance(model(x)[1])


def no_value(model, x, y):
    c = covariance(model(x)[1])
    return plain(model, x, y) + 5.0 * (c - c.detach())


def by_labels(model, x, y):
    return plain(model, x, y) * (1.0 + 1e-4 * y.float().mean())


@pytest.mark.parametrize(
    ("losses", "said"),
    [(little, "changes with the other samples"), (by_labels, "changes with the other samples")],
)
def test_a_little_of_the_others(losses, said):
    net, step, batch = made(losses)
    with pytest.raises(InputError, match=said):
        step(*batch)
    assert all(p.grad is None for p in net.parameters())
    plain(net, *batch).sum().backward()  # the model is free
    assert all(p.grad is not None for p in net.parameters())


def test_losses_are_looked_at_in_the_size_that_is_captured():
    """Draws of four fill a graph for eight, where these losses mix samples."""

    def losses(model, x, y):
        output, _ = model(x)
        return (output - (output.mean(0) if len(x) > 5 else 0.0)).square().mean(1)

    net, step, batch = made(losses)
    with pytest.raises(InputError, match="changes with the other samples"):
        step(*(x[:4] for x in batch))
    assert all(p.grad is None for p in net.parameters())


def test_a_term_whose_value_is_zero_and_whose_gradient_is_not():
    _, step, batch = made(no_value)
    with pytest.raises(InputError, match=r"at model\.a .*the gradient at its output changes with a sample"):
        step(*batch)


def test_random_numbers_of_its_own():
    """Two runs differ, and what comes of an exchange cannot be told: this is said."""
    generator = np.random.default_rng(0)

    def losses(model, x, y):
        return plain(model, x * float(1.0 + 0.01 * generator.normal()), y)

    _, step, batch = made(losses)
    with pytest.warns(DpfastWarning, match=r"losses\(model, \*batch\) could not be run .*two runs on the same samples"):
        step(*batch)


class Criterion:
    """Holds what cannot be copied, and is told a number with each batch."""

    def __init__(self):
        self.keeps = (x for x in ())

    def __call__(self, model, x, y, scale):
        return plain(model, x, y) * scale


@pytest.mark.parametrize("layout", [None, {"b": 0}])
def test_losses_that_are_apart(layout):
    """None of it is said, the sum is right, and dropout is no reason either."""
    net, step, batch = made(Criterion(), layout=layout)
    exact = loop_over_samples(net, lambda m, x, y: plain(m, x, y).sum() * 2.0, *batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        step(*batch, 2.0)
        for name, p in net.named_parameters():
            assert relative_error(p.grad, clipped_sum(exact, C)[name]) < 1e-5
        net.train()
        net.zero_grad()
        step(*batch, 2.0)


class Later(Net):
    """Samples meet once a weight of that is no longer zero, as a schedule of somebody's sets it."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, x):
        h = self.a(x).tanh()
        if self.where == "layers":
            h = h + self.weight * h.mean(0)
        output = self.b(h)
        return output + self.weight * output.mean(0) if self.where == "output" else output, h


@pytest.mark.parametrize("where", ["layers", "output", "loss"])
def test_a_weight_that_was_zero_when_the_step_was_captured(where):
    """One sample moved the sum of a graph, in which nobody looks."""
    torch.manual_seed(0)
    net, (x, y) = Later(where), (torch.randn(N, 5), torch.randint(0, 10, (N,)))

    def losses(model, x, y):
        output, h = model(x)
        found = F.cross_entropy(output, y, reduction="none")
        return found + net.weight * h.std(0).sum() if where == "loss" else found

    step = dpfast.compile_step(net, losses, max_grad_norm=C, batch_size=N, backend="eager")
    step(x, y)
    grads = [p.grad.clone() for p in net.parameters()]
    net.weight.fill_(5.0)
    for _ in range(2):  # and once more
        with pytest.raises((InputError, UnsupportedModuleError), match=r"other samples|not its own|several samples"):
            step(x, y)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads, strict=True))


def test_looks_at_later_steps_change_nothing(monkeypatch):
    torch.manual_seed(0)
    net, step, batch = made(plain)
    exact = clipped_sum(loop_over_samples(net, lambda m, x, y: plain(m, x, y).sum(), *batch), C)
    looks = []
    monkeypatch.setattr(steps, "check_apart", lambda *args: looks.append(check_apart(*args)))
    before = torch.get_rng_state()
    for _ in range(10):
        net.zero_grad()
        step(*batch)
        for name, total in exact.items():
            assert relative_error(net.get_parameter(name).grad, total) < 1e-5, name
    assert torch.equal(torch.get_rng_state(), before)
    assert len(looks) == 3 and len(step._graphs) == 1  # the 1st, 2nd and 8th
