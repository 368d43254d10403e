"""Samples that a forward keeps outside of its modules, in globals, attributes of classes, closures, defaults, and that
move later sums, are refused as those in its modules are."""

import collections
import types

import pytest
import torch
from two_linears import D, N, Net, clipping

from dpfast.errors import UnsupportedModuleError


class Kept(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.last(self.how(self, self.first(x).tanh()))


def helper():
    """Has attributes."""


@pytest.fixture(autouse=True)
def as_at_first():
    global LAST
    LAST, HELD.mean, Centred.mean, Helper.mean = None, 0.0, 0, 0
    for some in (BY_NAME, LISTED, QUEUED, vars(helper)):
        some.clear()
    MEAN.zero_()
    if "mean" in vars(Kept):
        del Kept.mean


MEAN, BY_NAME, LISTED, LAST, QUEUED = torch.zeros(7), {}, [], None, collections.deque(maxlen=4)
HELD = types.SimpleNamespace(mean=0.0)


def global_tensor(self, h):
    output = h - MEAN
    MEAN.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return output


def global_dict(self, h):
    output = h - BY_NAME.get("mean", 0)
    BY_NAME["mean"] = h.detach().mean(0)
    return output


def global_list(self, h):
    output = h - (LISTED[-1] if LISTED else 0)
    LISTED.append(h.detach().mean(0))
    return output


def global_name(self, h):
    global LAST
    output = h if LAST is None else h - LAST
    LAST = h.detach().mean().item()
    return output


def global_queue(self, h):
    output = h - (sum(QUEUED) / len(QUEUED) if QUEUED else 0)
    QUEUED.append(h.detach().mean().item())
    return output


def global_object(self, h):
    output = h - HELD.mean
    HELD.mean = h.detach().mean()
    return output


def attribute_of_a_class(self, h):
    output = h - getattr(Kept, "mean", 0)
    type(self).mean = h.detach().mean(0)
    return output


def attribute_of_a_function(self, h):
    output = h - getattr(helper, "mean", 0)
    helper.mean = h.detach().mean()
    return output


def default(self, h, kept=[0]):  # noqa: B006
    output = h - kept[0]
    kept[0] = h.detach().mean()
    return output


class Centred(torch.autograd.Function):
    mean = 0

    @staticmethod
    def forward(ctx, h):
        output = h - Centred.mean
        Centred.mean = h.mean()
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def class_of_a_function(self, h):
    return Centred.apply(h)


class Helper:
    mean = 0

    @classmethod
    def centred(cls, h):
        output = h - cls.mean
        cls.mean = h.detach().mean()
        return output


def method_of_a_class(self, h):
    return Helper.centred(h)


def variable_of_a_closure():
    mean = 0

    def how(self, h):
        nonlocal mean
        output, mean = h - mean, h.detach().mean()
        return output

    return how


def of_an_object(self, h):
    return self.helper.centred(h)


MOVES = [global_tensor, global_dict, global_list, global_name, global_queue, global_object, attribute_of_a_class]
MOVES += [
    attribute_of_a_function,
    default,
    class_of_a_function,
    method_of_a_class,
    variable_of_a_closure(),
    of_an_object,
]


@pytest.mark.parametrize("how", MOVES)
def test_samples_in_it_move_later_sums(how):
    """These were not seen, or taken on trust with a warning."""
    net = Kept(how)
    net.helper = Helper()
    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(net)(torch.randn(N, D))


def test_hooks_keep_too():
    net, kept = Kept(lambda self, h: h), [0]

    def centred(module, inputs, output):
        output, kept[0] = output - kept[0], output.detach().mean()
        return output

    net.first.register_forward_hook(centred)
    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(net)(torch.randn(N, D))
    assert kept == [0]
