"""Where a look tells nothing, this is said; what is no tensor tells nothing."""

import dataclasses
import itertools
import random
import warnings
from collections import UserDict

import numpy
import pytest
import torch
from cases import clipped_as_told
from two_linears import C, D, N, Net, clipping, step

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


# --- looks that tell nothing say so ---

SYSTEM, NUMBERS = random.SystemRandom(), itertools.count()
DRAWS = {"the system's": lambda: SYSTEM.gauss(0, 1), "itertools.count": lambda: next(NUMBERS)}


class Draws(Net):
    how = ""

    def forward(self, x):
        h = self.first(x * (1 + 0.01 * DRAWS[self.how]()))
        return self.last(torch.tanh(h - h.mean(0)))


class Checks(Net):
    def forward(self, x, lengths):
        if not bool((lengths[:-1] >= lengths[1:]).all()):
            raise ValueError("sort the batch by length")
        h = self.first(x)
        return self.last(torch.tanh(h - h.mean(0)))


class RunsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.tanh()
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.kept
        del ctx.kept
        return grad * (1 - kept * kept)


class Once(Net):
    def forward(self, x):
        output = self.last(RunsOnce.apply(self.first(x)))
        return output.square().sum(), output


@pytest.mark.parametrize("how", DRAWS)
def test_what_cannot_be_put_back(how):
    model = Draws()
    model.how = how
    with pytest.raises(DpfastWarning, match="two runs on the same samples differ"):
        step(clipping(model), torch.randn(N, D))


def test_inputs_that_may_not_be_exchanged():
    """Where warnings are errors, as docs/errors.md has it, whoever tries again is told again."""
    wrapped = clipping(Checks())
    for _ in range(3):
        with pytest.raises(DpfastWarning, match="it fails, ValueError: sort the batch by length"):
            step(wrapped, torch.randn(4, D), torch.tensor([9, 7, 4, 2]))


def test_backward_passes_that_run_once():
    with pytest.raises(DpfastWarning, match="more than one backward pass through it fails, AttributeError"):
        clipping(Once())(torch.randn(N, D))


class Tasks(Net):
    def forward(self, x, task):
        h = self.first(x)
        return self.last(h - h.mean(0) if task == "centred" else h)


def test_more_kinds_than_are_looked_at():
    wrapped, x = clipping(Tasks()), torch.randn(3, D)
    for i in range(64):
        step(wrapped, x, f"task {i}")
    with pytest.raises(DpfastWarning, match="another kind of input than the 64"):
        step(wrapped, x, "centred")
    with pytest.warns(DpfastWarning, match="another kind of input than the 64"):
        step(wrapped, x, "centred")
    step(wrapped, x, "one more")  # it has been said


# --- what a model is called with ---


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class TimeFirst(Net):
    def forward(self, batch):
        if isinstance(batch, Slots):
            x = batch.x
        elif isinstance(batch, OwnDict):
            x = batch["x"]
        elif isinstance(batch, OwnList) and isinstance(batch[0], torch.Tensor):
            x = batch[0]
        else:
            x = torch.as_tensor(numpy.array(batch), dtype=torch.float32, device=self.first.weight.device)
        return self.last(torch.tanh(self.first(x.transpose(0, 1)))).sum(0)


@pytest.mark.parametrize(
    "holder", [Slots, lambda x: OwnDict(x=x), lambda x: OwnList([x])], ids=["slots", "dict", "list"]
)
def test_tensors_in_objects_of_other_kinds(holder):
    torch.manual_seed(0)
    model, x = TimeFirst(), torch.randn(4, 6, D)
    exact = loop_over_samples(model, lambda m, x: m(holder(x)).square().sum(), x)
    step(clipping(model), holder(x))
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5


@pytest.mark.parametrize("cls", [GradSampleModuleFastGradientClipping, GradSampleModule])
def test_no_tensors_and_no_entries_are_an_error(cls):
    wrapped, batch = cls(TimeFirst()), 0.5
    with pytest.raises(InputError, match=r"called with no tensor that has samples in dimension 0 \(with float"):
        wrapped(batch)
    with torch.no_grad(), pytest.raises(IndexError):  # the model's own
        wrapped(batch)
    step(wrapped, OwnDict(x=torch.randn(4, 6, D)))


# --- which kinds of input are told apart, and outputs of none ---


class ByKey(Net):
    """Another branch where a mapping has another key, which is no dict."""

    def forward(self, some):
        if "mixed" in some:
            h = self.first(some["mixed"])
            return self.last(h - h.mean(0))
        return self.last(self.first(some["x"]))


def test_other_keys_of_a_mapping_are_looked_at():
    wrapped = clipping(ByKey())
    for _ in range(2):  # of which the second is looked at again, whatever it is
        step(wrapped, UserDict(x=torch.randn(N, D)))
    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        step(wrapped, UserDict(mixed=torch.randn(N, D)))


class Silent(Net):
    """Its output is in an attribute, and no look is possible: it draws numbers of its own."""

    def forward(self, x):
        self.output = self.last(torch.tanh(self.first(x)) + SYSTEM.gauss(0, 1))


def test_that_a_look_told_nothing_is_said_where_nothing_is_returned():
    wrapped = clipping(Silent())
    with pytest.warns(DpfastWarning, match="two runs on the same samples differ"):
        wrapped(torch.randn(N, D))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(torch.randn(N, D))


# --- tensors in attributes do not keep a model from being looked at ---


class Holding(Net):
    """A plain tensor, and what the forward before has left, with its graph."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes, self.scale, self.kept, self.listed = mixes, torch.ones(7), None, []

    def forward(self, x):
        h = torch.tanh(self.first(x) * self.scale)
        self.kept = self.last(h - h.mean(0) if self.mixes and x.dim() == 3 else h)
        self.listed = [{"h": h}]
        return self.kept


def test_a_model_that_holds_tensors_is_looked_at():
    torch.manual_seed(0)
    model = Holding(mixes=True)
    wrapped = clipping(model)
    step(wrapped, torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        step(wrapped, torch.randn(N, 2, D))


@pytest.mark.parametrize("shape", [(N, D), (N, 2, D)])
def test_a_model_that_holds_tensors_is_right(shape):
    torch.manual_seed(0)
    model, x = Holding(mixes=False), torch.randn(shape)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = clipping(model)
    for _ in range(3):
        step(wrapped, x)
    for name, total in clipped_as_told(wrapped.get_clipping_coef(), exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5, name


class FailsLater(Net):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        if type(self).calls > 40 and len(x) != N:
            raise ValueError("not so few any more")
        return self.last(torch.tanh(self.first(x)))


def test_a_later_look_that_fails_is_said():
    wrapped = clipping(FailsLater())
    step(wrapped, torch.randn(N, D))
    FailsLater.calls = 40
    with pytest.warns(DpfastWarning, match="could not be run .* ValueError: not so few any more"):
        wrapped(torch.randn(N, D))


class Picky(Net):
    """Its layers may give what they give and nothing else, so noise on it is refused."""

    mixes = True

    def forward(self, x):
        h = self.first(x)
        if not torch.equal(h, torch.nn.functional.linear(x, self.first.weight, self.first.bias)):
            raise ValueError("somebody has changed it")
        h = torch.tanh(h)
        return self.last(h + 0.0 * h.mean(0) if self.mixes else h)


def test_a_look_without_noise_is_said_once():
    """What is hidden by a zero is not seen then; it was taken on trust without a word."""
    wrapped, x = clipping(Picky()), torch.randn(N, D)
    with pytest.warns(DpfastWarning, match="not with noise on what its layers give: ValueError: somebody") as said:
        for _ in range(3):
            step(wrapped, x)
            wrapped.zero_grad()
    assert len(said) == 1


@pytest.mark.parametrize("sizes", [(N, 0, N), (1, 0, N), (0, N, 0), (0, 0, N)])
def test_an_empty_batch_tells_nothing_and_nobody_is_warned(sizes):
    """It is none of those that are looked at: what mixes samples is found in the next that has some."""
    wrapped, late = clipping(Late()), Late()
    mixing = clipping(late)
    for n in sizes:
        step(wrapped, torch.randn(n, D))
    step(mixing, torch.randn(N, D))
    step(mixing, torch.randn(0, D))
    late.mixes = True
    with pytest.raises(UnsupportedModuleError, match="samples"):
        step(mixing, torch.randn(N, D))


class Late(Net):
    mixes = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h - h.mean(0) if self.mixes else h)


def test_a_model_that_holds_what_an_ordinary_pass_made_is_compiled():
    """An evaluation with gradients came before; neither the graph nor the loop over samples could copy the model."""
    torch.manual_seed(0)
    model, x = Holding(mixes=False), torch.randn(N, D)
    model(x).sum().backward()
    model.zero_grad()
    exact = clipped_sum(loop_over_samples(model, lambda m, x: m(x).square().sum(), x), C)
    compiled = compile_step(model, lambda m, x: m(x).square().sum(1), max_grad_norm=C, batch_size=N, backend="eager")
    compiled(x)
    for name, total in exact.items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5, name


def test_nested_tensors_are_refused_when_they_are_seen():
    ragged = torch.nested.nested_tensor([torch.randn(t, 6) for t in (2, 5, 3)], layout=torch.jagged)
    for wrap in (GradSampleModule, GradSampleModuleFastGradientClipping):
        with pytest.raises(InputError, match=r"called with a nested tensor.*to_padded_tensor"):
            wrap(torch.nn.Linear(6, 3))(ragged)
