"""Samples that a forward keeps outside of its modules, in globals, attributes of classes, closures, defaults, and that
move later sums, are refused as those in its modules are."""

import collections
import contextvars
import functools
import sys
import threading
import types
import weakref

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
    STANDS_ELSEWHERE.MEANS.clear()
    SOMEBODYS.how = functools.partial(STANDS_ELSEWHERE.centred)
    for some in (BY_NAME, LISTED, QUEUED, HOLDS, OWN, vars(helper), vars(MEAN), vars(LOCAL)):
        some.clear()
    MEAN.zero_()
    QUEUE.zero_()
    PARTIAL.args[0][0] = remembered()[0] = remembered_last()[0] = 0
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


HOLDS, KEY, CONTEXT = weakref.WeakKeyDictionary(), Helper(), contextvars.ContextVar("mean", default=0)
QUEUE, LOCAL, OWN = torch.zeros(2**18, 7), threading.local(), collections.UserDict()
DRAWS = torch.Generator()


def _kept_in_a_list(kept, h):
    output = h - kept[0]
    kept[0] = h.detach().mean()
    return output


PARTIAL = functools.partial(_kept_in_a_list, [0])


def argument_of_a_partial(self, h):
    return PARTIAL(h)


@functools.cache
def remembered():
    return [0]


@functools.lru_cache(maxsize=4)
def remembered_last():
    return [0]


def in_a_cache(self, h):
    return _kept_in_a_list(remembered(), h)


def in_a_small_cache(self, h):
    return _kept_in_a_list(remembered_last(), h)


def weak_dict(self, h):
    output = h - HOLDS.get(KEY, 0)
    HOLDS[KEY] = h.detach().mean()
    return output


def context_variable(self, h):
    output = h - CONTEXT.get()
    CONTEXT.set(h.detach().mean())
    return output


def attribute_of_a_tensor(self, h):
    output = h - getattr(MEAN, "last", 0)
    MEAN.last = h.detach().mean()
    return output


def large_queue(self, h):
    output = h - QUEUE[0]
    QUEUE[0] = h.detach().mean(0)
    return output


def of_a_thread(self, h):
    output = h - getattr(LOCAL, "mean", 0)
    LOCAL.mean = h.detach().mean()
    return output


def somebodys_dict(self, h):
    output = h - OWN.get("mean", 0)
    OWN["mean"] = h.detach().mean()
    return output


def by_a_string(self, h):
    output = h - globals().get("BY_STRING", 0)
    globals()["BY_STRING"] = h.detach().mean()
    return output


def by_the_module(self, h):
    output = h - getattr(sys.modules[__name__], "BY_MODULE", 0)
    sys.modules[__name__].BY_MODULE = h.detach().mean()
    return output


STANDS_ELSEWHERE = types.ModuleType("stands_elsewhere")  # its functions are found by what imports it
exec(
    "MEANS = {}\n"
    "def centred(h):\n"
    "    output = h - MEANS.get('last', 0)\n"
    "    MEANS['last'] = h.detach().mean()\n"
    "    return output\n",
    vars(STANDS_ELSEWHERE),
)
sys.modules["stands_elsewhere"] = STANDS_ELSEWHERE


def imported_within(self, h):
    import stands_elsewhere

    return stands_elsewhere.centred(h)


def imported_by_name_within(self, h):
    from stands_elsewhere import centred

    return centred(h)


SOMEBODYS = Helper()


def function_in_an_object(self, h):
    return SOMEBODYS.how(h)


MOVES = [global_tensor, global_dict, global_list, global_name, global_queue, global_object, attribute_of_a_class]
MOVES += [
    attribute_of_a_function,
    default,
    class_of_a_function,
    method_of_a_class,
    variable_of_a_closure(),
    of_an_object,
]


MOVES += [
    argument_of_a_partial,
    in_a_cache,
    in_a_small_cache,
    weak_dict,
    context_variable,
    attribute_of_a_tensor,
    large_queue,
    of_a_thread,
]
MOVES += [somebodys_dict, by_a_string, by_the_module, imported_within, imported_by_name_within, function_in_an_object]


@pytest.mark.parametrize("how", MOVES)
def test_samples_in_it_move_later_sums(how):
    """These were not seen, or taken on trust with a warning."""
    net = Kept(how)
    net.helper = Helper()
    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(net)(torch.randn(N, D))


def centred_by_a_global(module, inputs, output):
    return global_dict(module, output)


def test_hooks_keep_in_globals():
    """By functions that others name, and that name themselves."""
    net = Kept(lambda self, h: h)
    net.first.register_forward_hook(centred_by_a_global)
    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(net)(torch.randn(N, D))
    assert not BY_NAME


def test_hooks_keep_too():
    net, kept = Kept(lambda self, h: h), [0]

    def centred(module, inputs, output):
        output, kept[0] = output - kept[0], output.detach().mean()
        return output

    net.first.register_forward_hook(centred)
    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(net)(torch.randn(N, D))
    assert kept == [0]


@pytest.mark.parametrize("of", ["globals", "the module"])
def test_how_much_is_drawn_may_follow_from_samples(of):
    """What is drawn in the next pass is other numbers then, and none that tell of a sample."""

    def how(self, h):
        generator = DRAWS if of == "globals" else self.generator
        output = h * (1 + torch.rand((), generator=generator))
        torch.rand(int((h.detach() > 0).sum()), generator=generator)
        return output

    net = Kept(how)
    net.generator = torch.Generator()
    clipping(net)(torch.randn(N, D))


def test_states_that_a_backward_pass_moves():
    """Behind a linear layer the gradient of a sum of outputs does not follow from samples: that showed nothing."""

    def how(self, h):
        output = h - HELD.mean
        output.register_hook(lambda gradient: setattr(HELD, "mean", gradient.mean().item()))
        return output

    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(Kept(how))(torch.randn(N, D))


def test_states_that_move_a_loss_kept_outside():
    def how(self, h):
        BY_NAME["loss"] = (h - HELD.mean).square().mean(1)
        HELD.mean = h.detach().mean()
        return h

    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(Kept(how))(torch.randn(N, D))


class Backend:
    """Answers for any name, with a function that fails."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def fails(*args):
            raise NotImplementedError(f"{name} is no operation of this backend")

        return fails


BACKENDS = {"numpylike": Backend()}


def test_beside_an_object_that_answers_for_any_name():
    """It passed for an array of NumPy's, and the model was on trust, with a warning."""

    def how(self, h):
        assert BACKENDS
        return global_dict(self, h)

    with pytest.raises(UnsupportedModuleError, match="changes what the next one gives"):
        clipping(Kept(how))(torch.randn(N, D))
