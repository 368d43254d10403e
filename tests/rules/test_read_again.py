"""Layers without a rule run again in the backward pass: what they read may not have changed, and what they hold is not
written to twice."""

import collections
import contextlib
import copy
import functools
import warnings
from types import SimpleNamespace

import numpy
import pytest
import torch
from distances import MODES, Distances, Model, inputs, loss_of, step, wrapped_with_plain
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError


@pytest.fixture(params=MODES)
def wrap(request):
    torch.manual_seed(0)
    return functools.partial(wrapped_with_plain, MODES[request.param])


_GLOBAL = {"scale": 1.0}


def _write(tensor):
    with torch.no_grad():
        tensor.fill_(3.0)


# What the layer reads: what it holds, how that changes, how it comes to a factor, and whether that is seen on a GPU.
_READ = {
    "a tensor": (lambda: torch.ones(3), lambda m: _write(m.kept), lambda m: m.kept, True),
    "its data": (lambda: torch.ones(3), lambda m: _write(m.kept.data), lambda m: m.kept, False),
    "another tensor": (lambda: torch.ones(3), lambda m: setattr(m, "kept", torch.zeros(3)), lambda m: m.kept, True),
    "in a list": (lambda: [1.0], lambda m: m.kept.__setitem__(0, 3.0), lambda m: m.kept[0], True),
    "in an object": (lambda: SimpleNamespace(x=1.0), lambda m: setattr(m.kept, "x", 3.0), lambda m: m.kept.x, False),
    "of all": (lambda: None, lambda _: _GLOBAL.update(scale=3.0), lambda _: _GLOBAL["scale"], False),
    "a parameter": (lambda: None, lambda m: _write(m.rows), lambda _: 1.0, True),
    "a buffer": (lambda: None, lambda m: _write(m.tau), lambda m: m.tau, True),
    "a function": (
        lambda: torch.ones_like,
        lambda m: setattr(m, "kept", torch.rand_like),
        lambda m: m.kept(m.tau),
        True,
    ),
}


@pytest.mark.on_cpu
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("read", _READ)
def test_whatever_it_reads_may_not_change_between_forward_and_backward(monkeypatch, wrap, read, steps, as_on_a_gpu):
    """With no layer in front whose gradients would need what the forward has saved, of which autograd knows better."""
    make, change, scale, seen = _READ[read]
    model = Model(Distances(lambda self, distances: distances * scale(self)))
    model.first, model.m.kept, _GLOBAL["scale"] = nn.Identity(), make(), 1.0
    if as_on_a_gpu:
        monkeypatch.setattr(dpfast.taps.gave, "is_waited_for", lambda x: True)
    wrapped = wrap(model)
    for _ in range(steps):
        loss_of(wrapped, inputs()).backward()
    loss = loss_of(wrapped, inputs())
    change(model.m)
    with pytest.raises(UnsupportedModuleError) if seen or not (steps and as_on_a_gpu) else contextlib.nullcontext():
        loss.backward()


@pytest.mark.on_cpu
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_a_number_is_found_as_the_forward_found_it(monkeypatch, wrap, as_on_a_gpu):
    model = Model(Distances())
    if as_on_a_gpu:
        monkeypatch.setattr(dpfast.taps.gave, "is_waited_for", lambda x: True)
    wrapped, gradients = wrap(model), []
    x = inputs()
    for changed in (1.0, 3.0):
        model.m.scale = 1.0
        wrapped.zero_grad()
        loss = loss_of(wrapped, x)
        model.m.scale = changed
        loss.backward()
        gradients.append([p.grad if p.grad is not None else p.grad_sample for p in model.parameters()])
        assert model.m.scale == changed
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_ordinary_steps_do_not_wait_for_a_gpu(monkeypatch):
    model, compared = Model(Distances(_keeps)), []
    monkeypatch.setattr(dpfast.taps.gave, "is_waited_for", lambda x: True)
    is_like = dpfast.taps.gave.Gave.is_like
    monkeypatch.setattr(dpfast.taps.gave.Gave, "is_like", lambda *args: compared.append(1) or is_like(*args))
    wrapped = MODES["one pass"](model)
    for _ in range(3):
        loss_of(wrapped, inputs()).backward()
        with torch.no_grad():
            model.m.rows.mul_(0.9)
    assert len(compared) == 1


def _keeps(self, distances):
    self.then_ = [self.scale]
    return distances


class Attributes(dict):
    a = property(lambda self: self["a"])


_WRITTEN = {
    "tensor": (torch.zeros(()), lambda x: x.add_(1.0), float),
    "array": (numpy.zeros(1), lambda x: x.__iadd__(1.0), sum),
    "set": (set(), lambda x: x.add(len(x)), len),
    "counter": (collections.Counter(), lambda x: x.update("a"), lambda x: x["a"]),
    "lists in a dict": ({"a": []}, lambda x: x["a"].append(1), lambda x: len(x["a"])),
    "deque": (collections.deque(), lambda x: x.append(1), len),
    "dict of a class of its own": (Attributes(a=0), lambda x: x.a, lambda x: None),
}


@pytest.mark.parametrize("kind", _WRITTEN)
def test_what_attributes_hold_is_written_to_once(wrap, kind):
    def forward(self, distances):
        _WRITTEN[kind][1](self.kept)
        return distances

    model, count = Model(Distances(forward)), _WRITTEN[kind][2]
    model.m.kept = model.m.same = copy.deepcopy(_WRITTEN[kind][0])
    wrapped = wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func forbids it for tensors: by a loop
        for number in range(1, 4):
            kept = model.m.kept
            step(wrapped, inputs())
            assert model.m.kept is model.m.same is kept
            assert count(kept) in (number, None)
