"""What a forward keeps at module or class level (masks, tables by length) has no tensors in it that have no values:
trial runs of the model on fake tensors fill such caches too."""

import collections
import contextlib
import copy
import functools
import gc
import types
import warnings

import pytest
import torch
from distances import Distances, Model, inputs
from torch import nn

import dpfast
from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error
from dpfast.trials import left_behind

T = 6
BY_LENGTH, NAMED, NESTED, LISTED, LOGGED = {}, {"masks": {}}, {}, [], collections.deque()
KEPT = None
ODD = types.SimpleNamespace(mask=None)


def mask(t):
    return torch.tril(torch.ones(t, t))


def by_length(t):
    if t not in BY_LENGTH:
        BY_LENGTH[t] = mask(t)
    return BY_LENGTH[t]


def in_a_tuple(t):
    if t not in BY_LENGTH:
        BY_LENGTH[t] = mask(t), torch.ones(())
    return BY_LENGTH[t][0]


def by_name(t):
    if t not in NAMED["masks"]:
        NAMED["masks"][t] = mask(t)
    return NAMED["masks"][t]


def in_a_new_dict(t):
    if t not in NESTED:
        NESTED[t] = {"mask": mask(t)}
    return NESTED[t]["mask"]


def in_an_object(t):
    if t not in NESTED:
        NESTED[t] = types.SimpleNamespace(mask=[mask(t)])
    return NESTED[t].mask[0]


def in_a_list(t):
    found = mask(t)
    LISTED.append(found)
    LOGGED.append((t, found))
    return found


def in_a_global(t):
    global KEPT
    if KEPT is None:
        KEPT = mask(t)
    return KEPT


@functools.lru_cache(maxsize=8)
def remembered(t):
    return mask(t)


class Causal(nn.Module):
    kept = None

    def __init__(self, mask_of):
        super().__init__()
        self.first, self.last, self.mask_of = nn.Linear(5, 7), nn.Linear(7, 3), mask_of

    def forward(self, x):
        mask = self.mask_of(x.shape[1]).to(x)
        return self.last(torch.einsum("tu,nud->ntd", mask, self.first(x)).tanh()).sum(1)


def in_the_class(t):
    if Causal.kept is None:
        Causal.kept = mask(t)
    return Causal.kept


def in_a_new_attribute(t):
    if not hasattr(Causal, "later"):
        Causal.later = mask(t)
    return Causal.later


@pytest.fixture(autouse=True)
def empty_caches():
    global KEPT
    for some in (BY_LENGTH, NAMED["masks"], NESTED, LISTED, LOGGED):
        some.clear()
    KEPT = Causal.kept = ODD.mask = None
    if hasattr(Causal, "later"):
        del Causal.later
    remembered.cache_clear()


def squared(model, x):
    return model(x).pow(2).sum()


CACHES = [by_length, in_a_tuple, by_name, in_a_new_dict, in_an_object, in_a_list, in_a_global, remembered]
CACHES += [in_the_class, in_a_new_attribute]


@contextlib.contextmanager
def nothing_said():
    """No warning is an error meanwhile, which a look would take for one of the model's."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert not [w.message for w in said if issubclass(w.category, DpfastWarning)]


@pytest.mark.parametrize("mask_of", CACHES)
def test_a_cache_of_ones_own(mask_of):
    """The model's own forward crashed on tensors without values, or gave such."""
    torch.manual_seed(0)
    x, net = torch.randn(4, T, 5), Causal(mask_of)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=0.01, loss_reduction="sum")
    with nothing_said():
        output = model(x)
    assert type(output) is torch.Tensor
    output.pow(2).sum().backward()
    plain = copy.deepcopy(model).to_standard_module()
    for name, total in clipped_sum(loop_over_samples(plain, squared, x), 0.01).items():
        assert relative_error(net.get_parameter(name).grad, total) < 1e-4, name
    assert all(type(x) is torch.Tensor for x in [*LISTED, *(x for _, x in LOGGED)])


def test_what_is_frozen_is_found():
    """A cache that the garbage collector does not name (``gc.freeze()``) gave a forward a tensor without values."""
    left_behind._remembering.cache_clear()
    gc.freeze()
    test_a_cache_of_ones_own(remembered)
    gc.freeze()
    test_what_is_not_known_is_none_and_said()


def test_a_forward_that_fails_leaves_nothing():
    """A look's run ends where shapes do not fit, too."""

    def mask_of(t):
        if len(BY_LENGTH) < 2:
            BY_LENGTH[len(BY_LENGTH)] = mask(t)
            raise ValueError("not yet")
        return mask(t)

    GradSampleModule(Causal(mask_of))
    with pytest.raises(ValueError, match="not yet"):
        GradSampleModule(Causal(mask_of))(torch.randn(4, T, 5))
    assert all(type(x) is torch.Tensor for x in BY_LENGTH.values())


def in_an_attribute(t):
    if ODD.mask is None:
        ODD.mask = mask(t)
    return ODD.mask


def in_a_variable():
    kept = None

    def mask_of(t):
        nonlocal kept
        if kept is None:
            kept = mask(t)
        return kept

    return mask_of


@pytest.mark.parametrize("mask_of", [in_an_attribute, in_a_variable()])
def test_what_code_names_is_as_it_was(mask_of):
    with nothing_said():
        output = GradSampleModule(Causal(mask_of))(torch.randn(4, T, 5))
    assert type(output) is torch.Tensor


def test_what_is_not_known_is_none_and_said():
    def mask_of(t):
        return globals()["_".join(("in", "an", "attribute"))](t)  # no string that stands in the code

    with pytest.warns(DpfastWarning, match="SimpleNamespace.mask; it is None now"):
        output = GradSampleModule(Causal(mask_of))(torch.randn(4, T, 5))
    assert type(output) is torch.Tensor


def test_a_variable_of_a_closure_is_none_and_said(monkeypatch):
    monkeypatch.setitem(globals(), "HIDDEN", in_a_variable())

    def mask_of(t):
        return globals()["".join(("HID", "DEN"))](t)

    with pytest.warns(DpfastWarning, match="a variable of a closure; it is None now"):
        output = GradSampleModule(Causal(mask_of))(torch.randn(4, T, 5))
    assert type(output) is torch.Tensor


def test_what_is_older_than_the_run_and_gone_is_not_spoken_of():
    older = [types.SimpleNamespace() for _ in range(100)]

    def mask_of(t):
        one = older.pop()
        one.itself, one.mask = one, mask(t)
        return one.mask

    with nothing_said():
        GradSampleModule(Causal(mask_of))(torch.randn(4, T, 5))


def test_the_copy_that_ran_is_found_among_what_is_young(monkeypatch):
    """Without going through the whole process, which takes longer than the look."""
    generations, collect = [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation) or collect(generation))
    GradSampleModule(Model(Distances()))(inputs())
    assert set(generations) == {0}


def test_an_interrupt_leaves_the_garbage_collector_as_it_was():
    def mask_of(t):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GradSampleModule(Causal(mask_of))(torch.randn(4, T, 5))
    assert gc.isenabled()


def test_a_captured_step():
    torch.manual_seed(0)
    x, net = torch.randn(4, T, 5), Causal(by_length)
    step = dpfast.compile_step(net, lambda m, x: m(x).pow(2).sum(1), max_grad_norm=0.01, batch_size=4, backend="eager")
    BY_LENGTH.clear()
    with nothing_said():
        step(x)
    assert type(net(x)) is torch.Tensor
    for name, total in clipped_sum(loop_over_samples(net, squared, x), 0.01).items():
        assert relative_error(net.get_parameter(name).grad, total) < 1e-4, name


def test_a_closure_of_torch_s_that_a_traceback_keeps_is_nobody_s_to_clear():
    """A capture that was refused; the next look emptied a variable of torch's own, and said that it was the user's."""

    class Unruled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.baddbmm(self.bias, x, self.weight.expand(len(x), -1, -1))

    def losses(m, x):
        return m(x).flatten(1).sum(1)

    step = dpfast.compile_step(Unruled(), losses, max_grad_norm=1.0, batch_size=4, backend="eager")
    with pytest.raises(UnsupportedModuleError) as _kept:
        step(torch.randn(4, T, 5))
    with nothing_said():
        GradSampleModule(nn.Linear(3, 2))(torch.randn(4, 3))
