"""Entries of samples in lists, arrays and dicts: of kinds that may be something else, alike, of one sample, and in what
experts are picked by."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, relative_error

C = 0.3


class Between(nn.Module):
    """Two layers, and what ``way`` makes of the first one's rows and of what else the model is called with."""

    def __init__(self, way, batch_dim=0):
        super().__init__()
        self.first, self.last, self.way, self.batch_dim = nn.Linear(4, 8), nn.Linear(8, 3), way, batch_dim

    def forward(self, x, given):
        return self.last(self.way(torch.tanh(self.first(x)), given))


def one_of(given, i):
    return given[i : i + 1]


def steps(model, *batches, of=one_of):
    """Each is right to a loop over samples."""
    plain = copy.deepcopy(model).double()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model.double(), max_grad_norm=C, loss_reduction="sum")
    for x, given in batches:
        x, found = x.double(), []
        for i in range(len(x)):
            plain.zero_grad()
            plain(x[i : i + 1], of(given, i)).square().sum().backward()
            found.append({name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None})
        exact = {
            name: torch.stack([g.get(name, torch.zeros_like(p)) for g in found]) for name, p in plain.named_parameters()
        }
        wrapped.zero_grad()
        wrapped(x, given).square().sum().backward()
        for name, summed in clipped_sum(exact, C).items():
            found = wrapped._module.get_parameter(name).grad
            assert relative_error(found, summed) <= 1e-6, name  # factors are made of bounds


def refused(model, x, given, **how):
    with pytest.raises(UnsupportedModuleError, match="several samples"):
        dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, **how)(x, given).sum().backward()


ALIKE = {
    "numbers of NumPy": (lambda n: [np.int64(7)] * n, lambda t: int(sum(t))),
    "array": (lambda n: np.array([7] * n), lambda t: int(t.sum())),
    "array of masks": (lambda n: np.ones((n, 9)), lambda t: float(t.sum())),
    "dicts": (lambda n: [{"length": 7}] * n, lambda t: sum(y["length"] for y in t)),
    "tensors": (lambda n: [torch.tensor(7)] * n, lambda t: int(sum(t))),
    "masks": (lambda n: [torch.ones(9, dtype=torch.bool)] * n, lambda t: int(torch.stack(t).sum())),
    "flags": (lambda n: [True] * n, lambda t: 1 + sum(t)),
    "lists": (lambda n: [[3, 4]] * n, lambda t: sum(map(sum, t))),
}


@pytest.mark.parametrize("what", ALIKE)
def test_entries_that_are_alike_in_the_whole_batch_get_others_too(what):
    made, total = ALIKE[what]
    refused(Between(lambda h, given: h / total(given)), torch.randn(6, 4), made(6))


@pytest.mark.parametrize("what", ALIKE)
def test_each_samples_own_of_these_are_right(what):
    made, total = ALIKE[what]
    model = Between(lambda h, given: torch.stack([row / total(given[i : i + 1]) for i, row in enumerate(h)]))
    steps(model, (torch.randn(6, 4), made(6)), (torch.randn(5, 4), made(5)))


def test_an_array_has_samples_where_tensors_have_them():
    def longest(h, given):
        return h / float(given.max())

    x, array = torch.randn(7, 6, 4), np.random.default_rng(0).random((7, 6))
    refused(Between(longest), x, array, batch_first=False)


def test_arrays_of_several_shapes_are_put_together_as_they_were():
    array = np.empty(6, dtype=object)
    for i in range(6):
        array[i] = np.ones((2, 1 + i % 3))
    refused(Between(lambda h, given: h / max(y.shape[1] for y in given)), torch.randn(6, 4), array)
    own = Between(lambda h, given: torch.stack([row / y.shape[1] for row, y in zip(h, given, strict=True)]))
    steps(own, (torch.randn(6, 4), array))


MAY_BE = {
    "few numbers": lambda n: tuple(range(1, n + 1))[:4],
    "by name": lambda n: {f"utterance {i}": i + 1 for i in range(n)},
    "tensors by number": lambda n: {i: torch.tensor(i + 1.0) for i in range(n)},
    "several for each": lambda n: list(range(1, 2 * n + 1)),
}


@pytest.mark.parametrize("what", MAY_BE)
def test_what_may_be_samples_or_something_else_is_on_trust_and_that_is_said(what):
    n = 4 if what == "few numbers" else 6
    model = dpfast.GradSampleModule(Between(lambda h, given: h * 0.5))
    with pytest.warns(DpfastWarning, match=f"collection of {n}, as many as there are samples"):
        model(torch.randn(n, 4), MAY_BE[what](n)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = dpfast.GradSampleModule(Between(lambda h, given: h * 0.5))
        other(torch.randn(7, 4), MAY_BE[what](n)).sum().backward()  # as long as nothing


def test_a_list_that_is_as_long_as_a_batch_by_accident_is_named_and_other_batches_are_right():
    scales = [0.5, 0.6, 0.3]
    model = Between(lambda h, given: h * sum(given))
    refusing = dpfast.GradSampleModule(copy.deepcopy(model))
    with pytest.raises(UnsupportedModuleError, match=r"or on the list that it is called with.*hold in the model"):
        refusing(torch.randn(3, 4), scales).sum().backward()
    refusing(torch.randn(5, 4), scales).sum().backward()  # is not refused for what that one was
    steps(model, (torch.randn(5, 4), scales), (torch.randn(6, 4), scales), of=lambda given, i: given)


ONE_EACH = {
    "numbers": lambda n: [1 + i for i in range(n)],
    "tensors": lambda n: list(torch.rand(n, 8).double()),
    "array": lambda n: 1.0 + np.arange(n),
}


@pytest.mark.parametrize("first", [1, 6])
@pytest.mark.parametrize("what", ONE_EACH)
def test_batches_of_one_have_lists_of_one(what, first):
    model = Between(lambda h, given: torch.stack([row * y for row, y in zip(h, given, strict=False)]))
    steps(model, *((torch.randn(n, 4), ONE_EACH[what](n)) for n in (first, 1, 5)))


def test_one_number_that_is_no_samples_stands_in_a_list_of_one():
    model = Between(lambda h, given: h * sum(given))
    steps(model, *((torch.randn(n, 4), [0.5]) for n in (1, 5, 1)), of=lambda given, i: given)


@dataclasses.dataclass
class Batch:
    scales: list


OF_MANY_SIZES = {
    "texts": (lambda n: ["ab" * (i % 3) for i in range(n)], lambda t: [1.0 + len(y) for y in t]),
    "flags": (lambda n: [i % 3 == n % 2 for i in range(n)], lambda t: [1.0 + y for y in t]),
    "tensors of several lengths": (lambda n: [torch.ones(1 + i % 4) for i in range(n)], lambda t: [y.sum() for y in t]),
    "dicts": (lambda n: [{"scale": 1.0 + i, "name": "a"} for i in range(n)], lambda t: [y["scale"] for y in t]),
    "lists of several lengths": (lambda n: [[1.0] * (1 + i % 4) for i in range(n)], lambda t: [sum(y) for y in t]),
    "an object's list": (lambda n: Batch([torch.tensor(1.0 + i) for i in range(n)]), lambda t: t.scales),
    "two lists": (lambda n: ([*range(n)], ["a"] * n), lambda t: [1.0 + i * len(y) for i, y in zip(*t, strict=True)]),
}


ONE_OF = {
    "an object's list": lambda t, i: Batch(t.scales[i : i + 1]),
    "two lists": lambda t, i: tuple(some[i : i + 1] for some in t),
}


@pytest.mark.parametrize("what", OF_MANY_SIZES)
def test_batches_of_many_sizes_are_of_one_kind(what):
    """Poisson sampling draws more sizes than there are kinds that would be looked at."""
    given, scales = OF_MANY_SIZES[what]
    model = Between(lambda h, t: h * torch.stack([torch.as_tensor(y, dtype=h.dtype) for y in scales(t)]).unsqueeze(1))
    wrapped = dpfast.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    counted = set()
    for n in range(4, 74):
        wrapped(torch.randn(n, 4), t := given(n)).sum().backward()
        assert str(t) == str(given(n))
        wrapped.zero_grad()
        if n > 6:
            counted.add(len(wrapped._tapped.probe._looks))
    assert len(counted) == 1 and max(counted) <= 3
    steps(model, *((torch.randn(n, 4), given(n)) for n in (6, 5, 9, 70)), of=ONE_OF.get(what, one_of))


def test_tensors_that_have_as_many_rows_as_there_are_of_them_by_accident():
    """They might be batches (a layer's keys), had there not been entries in other batches."""
    model = Between(lambda h, boxes: h * torch.stack([y.sum() for y in boxes]).unsqueeze(1))
    rows = ([3, 1, 4, 1, 5, 2], [5] * 5, [1], [2, 2])
    steps(model, *((torch.randn(len(k), 4), [torch.rand(m, 4).double() for m in k]) for k in rows))


def test_batches_of_many_sizes_whose_entries_meet_are_refused_at_each():
    wrapped = dpfast.GradSampleModule(Between(lambda h, texts: h * (1.0 + max(map(len, texts)))))
    for n in (*range(5, 76, 14), 6):
        with pytest.raises(UnsupportedModuleError, match="several samples"):
            wrapped(torch.randn(n, 4), ["ab" * (i % 3) for i in range(n)]).sum().backward()


class ByName(nn.Module):
    """Experts that a list of names picks."""

    def __init__(self, rows):
        super().__init__()
        self.first, self.last, self.rows = nn.Linear(4, 8), nn.Linear(8, 3), rows
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"})

    def forward(self, x, names):
        h = torch.tanh(self.first(x))
        found = torch.zeros_like(h)
        for name, head in self.heads.items():
            rows = self.rows([name == other for other in names])
            found[rows] = head(h[rows])
        return self.last(found)


@pytest.mark.parametrize(
    "rows",
    [torch.tensor, lambda mask: torch.tensor(mask).nonzero().squeeze(1), np.flatnonzero],
    ids=["mask", "numbers", "NumPy's"],
)
def test_experts_that_names_pick(rows):
    steps(ByName(rows), *((torch.randn(n, 4), [*"abcaabcb"[:n]]) for n in (6, 5, 1, 8)))
