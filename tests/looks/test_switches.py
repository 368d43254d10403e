"""What a caller sets on a model between forward passes may be another way through it, which is looked at."""

import copy
import enum
from types import SimpleNamespace

import pytest
import torch
from noted import Noted
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

N, T, D = 4, 3, 4
FORWARDS = Noted()
MODES = pytest.mark.parametrize("mode", [GradSampleModule, GradSampleModuleFastGradientClipping])


class Way(enum.Enum):
    TOGETHER = 1
    AGAIN_AND_AGAIN = 2


class Switched(nn.Module):
    """(N, T, D) -> (N, 2). Its rows are folded in one order or the other, or samples meet."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.flag, self.number, self.share, self.text, self.enum = False, 1, 0.0, "a", Way.TOGETHER
        self.config, self.counted, self.kept = SimpleNamespace(mix=False), 0, None

    def forward(self, x):
        FORWARDS.note(len(x))
        self.counted += 1
        n, t, _ = x.shape
        if self.flag or self.number == 2 or self.share or self.text == "b" or self.enum is Way.AGAIN_AND_AGAIN:
            h = self.first(x.transpose(0, 1).reshape(n * t, D)).view(t, n, D).transpose(0, 1)
        else:
            h = self.first(x.reshape(n * t, D)).view(n, t, D)
        h = torch.tanh(h)
        if self.config.mix or getattr(self, "later", False):
            h = h - h.mean(0)
        self.kept = h.sum()
        return self.last(h).sum(1)


def loss(model, x):
    return model(x).square().sum()


def wrapped(mode, model):
    clipping = {} if mode is GradSampleModule else {"max_grad_norm": 1.0}
    return mode(copy.deepcopy(model), loss_reduction="sum", **clipping)


def assert_right(module, model):
    x = torch.randn(N, T, D)
    exact = loop_over_samples(model, loss, x)
    module.zero_grad()
    loss(module, x).backward()
    if isinstance(module, GradSampleModuleFastGradientClipping):
        assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
    else:
        named = dict(module._module.named_parameters())
        assert all(relative_error(named[name].grad_sample, exact[name]) <= 1e-5 for name in exact)


@MODES
@pytest.mark.parametrize(
    "name, value", [("flag", True), ("number", 2), ("share", 0.3), ("text", "b"), ("enum", Way.AGAIN_AND_AGAIN)]
)
def test_rows_folded_in_another_order_from_then_on(mode, name, value):
    torch.manual_seed(0)
    model = Switched()
    module, before = wrapped(mode, model), getattr(model, name)
    for _ in range(4):
        assert_right(module, model)
    for now in (value, value, before, before, value):
        setattr(model, name, now)
        setattr(module._module, name, now)
        assert_right(module, model)


@MODES
@pytest.mark.parametrize("how", ["in the configuration", "another configuration", "an attribute that was not there"])
def test_samples_that_meet_from_then_on_are_refused(mode, how):
    torch.manual_seed(0)
    model = Switched()
    module = wrapped(mode, model)
    for _ in range(4):
        assert_right(module, model)
    if how == "in the configuration":
        module._module.config.mix = True
    elif how == "another configuration":
        module._module.config = SimpleNamespace(mix=True)
    else:
        module._module.later = True
    module.zero_grad()
    with pytest.raises(UnsupportedModuleError):
        loss(module, torch.randn(N, T, D)).backward()


def forwards_of_steps(module, each, steps=24):
    torch.manual_seed(0)
    FORWARDS.clear()
    for i in range(steps):
        each(i, module._module)
        module.zero_grad()
        loss(module, torch.randn(N, T, D)).backward()
    return len(FORWARDS.all())


@MODES
def test_stages_that_come_one_after_the_other(mode):
    """Each with a value that it never had: no counter, as it stays for a while."""
    torch.manual_seed(0)
    model = Switched()
    model.number = 7
    module = wrapped(mode, model)
    for stage in (7, 6, 5, 4, 3, 9, 8, 2, 7):
        model.number = module._module.number = stage
        for _ in range(2):
            assert_right(module, model)


def nothing(i, model):
    pass


def counts_steps(i, model):
    model.number = i + 3


def names_steps(i, model):
    model.text = f"step {i}"


def is_of_no_kind(i, model):
    model.share, model.kept = 0.1 + i, torch.zeros(3)


@pytest.mark.parametrize("each, more", [(is_of_no_kind, 1), (counts_steps, 3), (names_steps, 3)])
def test_a_counter_is_not_looked_at_for_ever(each, more):
    usual = forwards_of_steps(GradSampleModule(Switched(), loss_reduction="sum"), nothing)
    looks = usual - 24
    assert forwards_of_steps(GradSampleModule(Switched(), loss_reduction="sum"), each) <= usual + more * looks


def test_what_is_set_in_turn_is_looked_at_once_each():
    """Tasks of a model, one after the other."""

    def turns(i, model):
        model.text = "xyz"[i % 3]

    usual = forwards_of_steps(GradSampleModule(Switched(), loss_reduction="sum"), nothing)
    assert forwards_of_steps(GradSampleModule(Switched(), loss_reduction="sum"), turns) <= 24 + 4 * (usual - 24)


def test_no_memory_is_held_for_it():
    module = GradSampleModule(Switched(), loss_reduction="sum")
    loss(module, torch.randn(N, T, D)).backward()
    assert not any(isinstance(x, torch.Tensor) for x in module._tapped.probe._switches._held)
