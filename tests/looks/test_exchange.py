"""Whose rows are whose, where shapes cannot tell: one sample is exchanged, and what changes is that one's."""

import copy
import random

import pytest
import torch
from folding_models import REFUSED, RIGHT, D, OverAndOver, T, Together
from torch import nn

import dpfast
from dpfast.looks.witness import Witness
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.3


@pytest.mark.parametrize("n", [1, 2, 3, T, D, 2 * T])
@pytest.mark.parametrize("make", RIGHT, ids=lambda m: m.__name__)
@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
def test_rows_are_those_of_their_samples(make, n, mode):
    torch.manual_seed(0)
    model, x = make(), torch.randn(n, T, D)

    def losses(m, x):
        return torch.sin(3.0 * m(x)).flatten(1).sum(1)

    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    if mode == "grad_sample":
        losses(dpfast.GradSampleModule(model, loss_reduction="sum"), x).sum().backward()
        for name, p in model.named_parameters():
            assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
        return
    wrapped = dpfast.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=C, passes=1 + (mode == "two passes")
    )
    values = losses(wrapped, x)
    values.sum().backward(retain_graph=True)
    if mode == "two passes":
        wrapped.disable_hooks()
        (wrapped.get_clipping_coef() * values).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name


def test_batches_of_other_sizes_and_none_at_all():
    torch.manual_seed(0)
    model = OverAndOver()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    for n in (0, 4, T, 1, 0, 7):
        x = torch.randn(n, T, D)
        wrapped.zero_grad()
        wrapped(x).square().sum().backward()
        assert wrapped.get_norm_sample().shape == (n,)
        if n:
            exact = loop_over_samples(model_of(wrapped), lambda m, x: m(x).square().sum(), x)
            assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def model_of(wrapped):
    plain = OverAndOver()
    plain.load_state_dict(wrapped._module.state_dict())
    return plain


def test_a_sample_that_is_not_finite_stays_alone():
    torch.manual_seed(0)
    x = torch.randn(4, T, D)
    x[1] = float("nan")
    model = OverAndOver()
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x[[0, 2, 3]])
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C)
    with pytest.warns(dpfast.errors.DpfastWarning):
        wrapped(x).square().sum().backward()
        for name, expected in clipped_sum(exact, C).items():
            assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name
        wrapped(x).square().sum().backward()


@pytest.mark.parametrize("n", [2, 3, 4, T, D])
@pytest.mark.parametrize("make", REFUSED, ids=lambda m: m.__name__)
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_rows_of_several_samples_are_refused_by_name(make, n, wrapper):
    torch.manual_seed(0)
    error, match = REFUSED[make]
    with pytest.raises(error, match=match):
        wrapper(make())(torch.randn(n, T, D)).square().sum().backward()


# --- once, and without a trace ---


@pytest.fixture
def runs(monkeypatch):
    """How often a layer has run on samples exchanged."""
    count = []
    run = Witness.run
    monkeypatch.setattr(Witness, "run", lambda self, *args: count.append(self.layer) or run(self, *args))
    return count


def test_it_is_done_now_and_then(runs):
    """The order of rows, then with noise: a run, and one for each of three samples. Later one for all three. Empty
    batches do not count."""
    wrapped, linears = dpfast.GradSampleModuleFastGradientClipping(Together()), 3
    looks = []
    for n in (3, 4, 7, 1, 0, 3, 3, 9, 3, 3):
        runs.clear()
        wrapped(torch.randn(n, T, D)).sum().backward()
        looks.append(len(runs) / linears)
    assert looks == [4 + 4, 2, 0, 0, 0, 0, 0, 0, 2, 0]
    runs.clear()
    wrapped(torch.randn(T, T, D)).sum().backward()  # as long by accident
    assert len(runs) / linears == 4 + 4 + 4  # at three samples, and at all, whose order is known


def test_nothing_is_left_behind():
    class Noisy(Together):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop, self.kept = nn.Dropout(0.5), None

        def between(self, x):
            self.calls += 1
            self.kept = self.drop(x)
            self.chance = random.random()
            return super().between(self.kept)

    model, seen = Noisy(), []
    model.lin.register_forward_hook(lambda m, args, out: seen.append(out))
    wrapped = dpfast.GradSampleModule(model)
    x = torch.randn(4, T, D)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), x.clone(), copy.deepcopy(model.state_dict())
    wrapped._tapped.probe.look(((x,), {}), [x], 4, b"")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert torch.equal(x, before[2]) and all(torch.equal(v, before[3][k]) for k, v in model.state_dict().items())
    assert not seen and model.kept is None and float(model.calls) == 0.0 and model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert wrapped._tapped._taps[1].places == {2: (0, True)}


class MeanOfLabels(nn.Module):
    """Mixes samples by an input of one whole number each."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x, labels):
        return self.head(x + self.table(labels).mean(0))


@pytest.mark.parametrize("n", [2, 4, 5])
def test_whole_numbers_are_exchanged_too(n):
    model = dpfast.GradSampleModuleFastGradientClipping(MeanOfLabels())
    with pytest.raises(dpfast.errors.DpfastError, match="samples"):
        model(torch.randn(n, 4), torch.arange(n)).square().sum().backward()
