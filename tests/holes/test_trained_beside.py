"""What a model trains beside its parameters is clipped by nobody: a gradient that reaches it is an error."""

import collections
import copy
import pickle
import types
import warnings

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import EscapedGradientError


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.beside = nn.Linear(4, 3), torch.ones(4, requires_grad=True)

    def forward(self, x):
        return self.inner(x * self.beside)

    def trained(self):
        return self.beside


class Buffer(Attribute):
    def __init__(self):
        super().__init__()
        del self.beside
        self.register_buffer("beside", torch.ones(4, requires_grad=True))


class InList(Attribute):
    def __init__(self):
        super().__init__()
        self.beside = [nn.Sequential(nn.Linear(4, 4), nn.Tanh())]

    def forward(self, x):
        return self.inner(self.beside[0](x))

    def trained(self):
        return self.beside[0][0].weight


class InDict(InList):
    def __init__(self):
        super().__init__()
        self.beside = {0: {"a": torch.nn.Parameter(torch.ones(4))}}

    def forward(self, x):
        return self.inner(x * self.beside[0]["a"])

    def trained(self):
        return self.beside[0]["a"]


class InObject(InList):
    """Of somebody's own, in a set in a deque in a module that is in a list."""

    def __init__(self):
        super().__init__()
        inner = nn.Identity()
        inner.own = types.SimpleNamespace(sets=collections.deque([{torch.ones(4, requires_grad=True)}]))
        self.beside = [inner]

    def forward(self, x):
        return self.inner(x * self.trained())

    def trained(self):
        return next(iter(self.beside[0].own.sets[0]))


MODES = {
    "one pass": dpfast.GradSampleModuleFastGradientClipping,
    "two passes": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, passes=2),
    "grad_sample": dpfast.GradSampleModule,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Attribute, Buffer, InList, InDict, InObject])
def test_a_gradient_that_reaches_it_is_refused(kind, mode):
    model = MODES[mode](kind())
    x = 100.0 * torch.randn(5, 4)
    with pytest.raises(EscapedGradientError, match=r"a gradient reached beside.* without being clipped"):
        model(x).square().sum(1).mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(model)
        pickle.dumps(model._module.trained())
    with pytest.raises(EscapedGradientError, match=r"a gradient reached beside.* without being clipped"):
        copied(x).square().sum(1).mean().backward()


@pytest.mark.parametrize("kind", [Attribute, Buffer, InList, InDict])
def test_what_is_put_in_its_place_later_is_seen(kind):
    """By the next look."""
    net = kind()
    net.trained().requires_grad_(False)
    if kind is InList:
        net.beside[0].requires_grad_(False)
    model, x = dpfast.GradSampleModuleFastGradientClipping(net), torch.randn(5, 4)
    model(x).square().sum(1).mean().backward()
    net.trained().requires_grad_(True)
    with pytest.raises(EscapedGradientError, match="a gradient reached beside"):
        for _ in range(20):
            model(x).square().sum(1).mean().backward()


def test_a_model_in_a_list_that_is_wrapped_itself_goes_on():
    """An actor holds its critic: what watches the critic's parameters for the actor is no hook of the user's."""

    class Actor(nn.Module):
        def __init__(self, critic):
            super().__init__()
            self.policy, self.others = nn.Linear(4, 4), [critic]

        def forward(self, x):
            return self.policy(x)

    critic = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(4, 1))
    actor = dpfast.GradSampleModuleFastGradientClipping(Actor(critic))
    x = torch.randn(5, 4)
    for _ in range(3):
        for model in (actor, critic):
            model.zero_grad()
            model(x).square().sum(1).mean().backward()
            assert all(p.grad.any() for p in model.parameters())


def test_gradients_of_others_are_their_own():
    """A module that is kept in a list and trained by other passes; inputs that are kept; hooks that are off."""
    critic = nn.Linear(3, 1)

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.critic, self.last = nn.Linear(4, 3), [critic], None

        def forward(self, x):
            self.last = x
            return self.inner(x)

    model = dpfast.GradSampleModuleFastGradientClipping(Holds())
    for _ in range(20):
        x = torch.randn(5, 4, requires_grad=True)
        model(x).square().sum(1).mean().backward()
        assert x.grad is not None
        critic(torch.randn(6, 3)).sum().backward()
    assert critic.weight.grad is not None
    for _ in range(20):
        model(x).square().sum(1).mean().backward()  # the one that it holds
    model = dpfast.GradSampleModuleFastGradientClipping(net := Attribute())
    model(torch.randn(5, 4))
    model.disable_hooks()
    model(torch.randn(5, 4)).square().sum().backward()
    assert net.beside.grad is not None
    net.beside.grad = None
    plain = model.to_standard_module()
    plain(torch.randn(5, 4)).square().sum().backward()
    assert net.beside.grad is not None and not net.beside._backward_hooks
