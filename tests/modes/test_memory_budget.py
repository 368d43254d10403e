"""memory_budget: what a step holds stays within it, and nothing else changes."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
from memory import peak_of_tensors
from torch import nn

import dpfast
from dpfast.arithmetic.cost import Size
from dpfast.errors import InputError, StateError
from dpfast.modes.memory_budget import plans
from dpfast.report.memory import storages

N, T = 6, 48
BOUNDS = 20 * 16 * T
"""Bytes a sample that are not planned: two numbers a position and factor, for error bounds."""


class Net(nn.Module):
    """Layers whose gradients are smaller than their inputs, a little larger, and much larger."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.small, self.middle, self.large = nn.Linear(32, 32), nn.Linear(32, 160), nn.Linear(160, 160)
        self.norm, self.head = nn.LayerNorm(160), nn.Linear(160, 50)

    def forward(self, x):
        x = self.conv(self.tokens(x).mT).mT
        return self.head(self.norm(self.large(self.middle(self.small(x)).relu())))


class Watched(dpfast.GradSampleModuleFastGradientClipping):
    """Says what a step holds when its norms are all that is missing."""

    def on_finish(self, step):
        factors = [f for entry in step.gathered.values() for f in entry.factors]
        self.held = sum(nbytes for _, nbytes in storages(factors))
        super().on_finish(step)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net(), torch.randint(50, (N, T))


def step(model, x):
    model.zero_grad(set_to_none=True)
    model(x).logsumexp(-1).mean(1).mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def least(net, x):
    """Bytes a sample."""
    with pytest.raises(InputError, match="cannot be met") as told:
        step(dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), memory_budget=1), x)
    return int(re.search(r"at least (\d+) bytes", str(told.value))[1])


@pytest.mark.parametrize("more", [1.0, 1.3, 1.8, 10.0])
def test_what_is_held_is_within_the_budget_and_the_sums_are_the_same(net, more):
    net, x = net
    budget = math.ceil(more * least(net, x))
    plain = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), max_grad_norm=0.1)
    model = Watched(copy.deepcopy(net), max_grad_norm=0.1, memory_budget=budget)
    expected = step(plain, x)
    for _ in range(3):  # the first learns the shapes
        found = step(model, x)
        assert 0 < model.held <= N * (budget + BOUNDS)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(model.get_norm_sample(), plain.get_norm_sample())
        assert (model.norm_slack >= 0).all()


@pytest.mark.on_cpu
def test_more_memory_writes_more_gradients(net):
    net, x = net
    held = []
    for more in (1.0, 1.5, 4.0, 100.0):
        model = Watched(copy.deepcopy(net), memory_budget=math.ceil(more * least(net, x)))
        step(model, x)
        first = model.held
        step(model, x)
        assert model.held >= first
        held.append(model.held)
    assert held == sorted(held) and held[0] < held[-1]


def test_the_smallest_budget_can_be_met_and_one_byte_less_cannot(net):
    net, x = net
    smallest = least(net, x)
    step(dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), memory_budget=smallest), x)
    model = dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=smallest - 1)
    with pytest.raises(InputError, match=f"at least {smallest} bytes"):
        step(model, x)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(StateError):
        model.get_norm_sample()


def test_a_ratio_is_of_the_inputs_and_what_the_message_names_is_enough(net):
    net, x = net
    with pytest.raises(InputError) as told:
        step(dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), memory_budget=0.01), x)
    ratio = float(re.search(r"a ratio of ([\d.]+)\)", str(told.value))[1])
    assert ratio < 1.0  # some gradients are smaller than their inputs
    smallest = least(net, x)
    model = Watched(net, memory_budget=ratio)
    step(model, x)
    assert 0 < model.held <= N * (smallest + BOUNDS)


class OneByOne(dpfast.GradSampleModuleFastGradientClipping):
    """Says the most that a first pass of two holds at a time."""

    most = 0

    def on_factor(self, step, parameter, factor, only_use):
        gathered = [f for entry in step.gathered.values() for f in entry.factors]
        self.most = max(self.most, sum(nbytes for _, nbytes in storages([*gathered, factor])))
        super().on_factor(step, parameter, factor, only_use)


@pytest.mark.parametrize(("again", "at_least"), [(False, 0.9), (True, 0.7)])
def test_what_the_message_says_of_two_passes_is_what_they_hold(net, again, at_least):
    """Of parameters that are used again it is a bound: how their uses lie to the largest layer is not asked."""
    net, x = net
    if again:
        net.middle = nn.Sequential(net.small, net.middle)
    with pytest.raises(InputError) as told:
        step(dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), memory_budget=1), x)
    least, one = map(
        int, re.search(r"at least (\d+) bytes.* here at most (\d+) bytes a sample", str(told.value)).groups()
    )
    model = OneByOne(net, passes=2)
    model(x).logsumexp(-1).mean(1).mean().backward()
    assert one < least and at_least * N * one <= model.most <= N * one


@pytest.mark.parametrize("more", [1.0, 1.6, 100.0])
def test_the_plan_does_not_depend_on_how_many_samples_there_are(net, more):
    net, x = net
    model = dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=math.ceil(more * least(net, x)))
    step(model, x)
    planned = dict(model._budget._written)
    assert True in planned.values()
    for batch in (x[:2], x[2:3], x[1:], x.repeat(4, 1)):
        step(model, batch)
        assert model._budget._written == planned


def test_lengths_that_come_again_are_planned_each(net):
    net, x = net
    model = Watched(net, memory_budget=10.0)
    held = [step(model, part) and model.held for part in (x, x[:, :30], x, x[:, :30])]
    assert held[2] >= held[0] and held[3] >= held[1]


@pytest.mark.on_cpu
def test_a_tight_budget_lowers_the_peak(net):
    net, x = net
    peaks = {}
    for more in (1.0, 100.0):
        model = dpfast.GradSampleModuleFastGradientClipping(
            copy.deepcopy(net), memory_budget=math.ceil(more * least(net, x))
        )
        for _ in range(2):
            step(model, x)
        model.zero_grad(set_to_none=True)
        peaks[more] = peak_of_tensors(
            lambda model=model: model(x).logsumexp(-1).mean(1).mean().backward(), model.parameters()
        )
    assert peaks[1.0] < peaks[100.0]


def test_a_copy_has_the_plan(net):
    net, x = net
    model = dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=10.0)
    step(model, x)
    for a, b in zip(step(copy.deepcopy(model), x), step(model, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("budget", [0, -1, 0.0, math.nan, "much", True])
def test_what_is_no_budget(budget):
    with pytest.raises(InputError, match="memory_budget"):
        dpfast.GradSampleModuleFastGradientClipping(nn.Linear(2, 2), memory_budget=budget)


def test_where_there_is_nothing_to_plan_it_is_refused(net, monkeypatch):
    net, x = net
    with pytest.raises(InputError, match="passes=1"):
        dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=1.0, passes=2)
    model = dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=10.0)
    with pytest.raises(InputError, match="not units"), model.units(torch.arange(N) // 2, N // 2):
        step(model, x)
    monkeypatch.setattr(model, "_wrapper", lambda: SimpleNamespace(kind="DDP", module=model))
    with pytest.raises(StateError, match="one process"):
        model.on_forward([x], ((x,), {}))


def test_per_layer_clipping_holds_nothing_to_plan(net):
    net, x = net
    clipper = dpfast.ConstantPerLayerClipper(1.0)
    step(dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=1, norm_clipper=clipper), x)
    assert all(p.grad is not None for p in net.parameters())


def test_an_empty_batch_is_no_plan(net):
    net, x = net
    model = dpfast.GradSampleModuleFastGradientClipping(net, memory_budget=10.0)
    step(model, x[:0])
    assert all((p.grad == 0).all() for p in net.parameters())
    step(model, x)


def test_plans_go_from_the_least_to_the_fastest():
    sizes = [
        Size(64, 10**9, 100, 200, "cpu"),  # smaller than its inputs: always written
        Size(64, 10**9, 4000, 1000, "cpu"),
        Size(64, 10**9, 2000, 1000, "cpu"),  # saves the same for fewer bytes
        Size(64, 10, 4000, 1000, "cpu"),  # writing costs more than its norm
        Size(1, 10**9, 4000, 1000, "cpu"),  # rank one
    ]
    found = list(plans(sizes))
    assert [p.held for p in found] == [4100, 5100, 8100]
    assert [sum(p.written) for p in found] == [1, 2, 3]
    assert found[-1].written == (True, True, True, False, False)
