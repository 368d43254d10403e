"""Which of a model's inputs has the samples: the first; where that is one that all share, an error says so."""

import warnings

import pytest
import torch
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

MODES = [GradSampleModule, GradSampleModuleFastGradientClipping]
IN_DOUBT = "times or a grid that all share came first"


class Field(nn.Module):
    """Values of N codes (N, D) at P points (P, 2)."""

    def __init__(self, ends=lambda y: y):
        super().__init__()
        self.points, self.codes, self.head = nn.Linear(2, 8), nn.Linear(3, 8), nn.Linear(8, 2)
        self.ends = ends

    def forward(self, points, codes):
        return self.ends(self.head(torch.tanh(self.points(points) + self.codes(codes).unsqueeze(-2))))


class Timed(nn.Module):
    """(N, T, 3) at times (T,), or at other times of each sample (N, T)."""

    def __init__(self, ends=lambda y: y):
        super().__init__()
        self.inner, self.head, self.ends = nn.Linear(3, 8), nn.Linear(8, 2), ends

    def forward(self, times, x):
        return self.ends(self.head(torch.tanh(self.inner(x) * times.unsqueeze(-1))))


def field_and_inputs(n):
    return Field(), {"points": torch.randn(9, 2), "codes": torch.randn(n, 3)}


def timed_and_inputs(n):
    return Timed(), {"times": torch.rand(7), "x": torch.randn(n, 7, 3)}


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("make", [field_and_inputs, timed_and_inputs])
@pytest.mark.parametrize("mode", MODES)
def test_what_all_samples_share_in_front(mode, make, n):
    """Its positions were clipped as samples, and a sample by nothing."""
    model, inputs = make(n)
    wrapped = mode(model)
    for _ in range(2):  # again too
        with pytest.raises(InputError, match=IN_DOUBT):
            wrapped(*inputs.values())
    with pytest.raises(InputError, match=IN_DOUBT):
        mode(make(n)[0])(**inputs)


@pytest.mark.parametrize("make", [field_and_inputs, timed_and_inputs])
@pytest.mark.parametrize("first", [1, 0])
def test_also_behind_a_first_batch_of_one_or_none(make, first):
    """One row may be one for all."""
    model, inputs = make(first)
    wrapped = GradSampleModuleFastGradientClipping(model)
    if first:
        wrapped(**inputs)
    else:
        with pytest.raises(InputError, match=IN_DOUBT):
            wrapped(**inputs)
    with pytest.raises(InputError, match=IN_DOUBT):
        wrapped(**make(4)[1])


def test_a_dict_of_them():
    class OfDict(Timed):
        def forward(self, batch):
            return super().forward(**batch)

    with pytest.raises(InputError, match=IN_DOUBT):
        GradSampleModuleFastGradientClipping(OfDict())(timed_and_inputs(4)[1])


@pytest.mark.parametrize("make", [field_and_inputs, timed_and_inputs])
def test_the_batch_in_front(make):
    """By keywords, in another order than the forward's, and what all share in one row for each."""
    model, inputs = make(4)
    shared, batch = inputs

    def loss(model, x):
        of_each = inputs[shared].to(x.dtype).expand(len(x), *inputs[shared].shape)
        return torch.sin(3.0 * model(**{batch: x, shared: of_each})).sum()

    exact = loop_over_samples(model, loss, inputs[batch])
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(wrapped, inputs[batch]).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_states_of_a_recurrent_layer_have_layers_in_front():
    class States(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)

        def forward(self, x, h, c):
            return self.lstm(x, (h, c))

    wrapped = GradSampleModuleFastGradientClipping(States())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given, (h, _) = wrapped(torch.randn(5, 7, 3), torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    (given.square().mean((1, 2)) + h.square().mean((0, 2))).mean().backward()
    assert wrapped.get_norm_sample().shape == (5,)


@pytest.mark.parametrize("first", ["times", "x"])
@pytest.mark.parametrize(
    "ends",
    [lambda y: y.flatten(0, 1), lambda y: torch.sin(3.0 * y).mean()],
    ids=["rows", "a loss"],
)
def test_an_output_that_does_not_tell_is_warned_about_once(ends, first):
    inputs = timed_and_inputs(4)[1]
    inputs = {"times": inputs["times"], "x": inputs["x"]} if first == "times" else dict(reversed(inputs.items()))
    if first == "x":
        inputs["times"] = inputs["times"].expand(4, -1)  # each has its own
    wrapped = GradSampleModuleFastGradientClipping(Timed(ends))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            wrapped(**inputs)
    found = [w for w in said if issubclass(w.category, DpfastWarning) and IN_DOUBT in str(w.message)]
    assert len(found) == (first == "times")
    assert [w.filename for w in found] == [__file__] * len(found)


@pytest.mark.parametrize("n", [1, 4])
def test_one_row_for_all_is_no_batch(n):
    wrapped = GradSampleModuleFastGradientClipping(Timed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(x=torch.randn(n, 7, 3), times=torch.rand(1, 7)).sum().backward()
    assert wrapped.get_norm_sample().shape == (n,)


def test_a_time_first_model_may_give_one_row_a_sample():
    class OfTheLast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

        def forward(self, x, mask):
            return self.head((self.inner(x)[0] * mask.t().unsqueeze(-1)).sum(0))

    wrapped = GradSampleModuleFastGradientClipping(OfTheLast(), batch_first=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(torch.randn(7, 5, 3), torch.ones(5, 7)).square().sum(1).mean().backward()
    assert wrapped.get_norm_sample().shape == (5,)


def test_positions_that_mix_may_be_a_time_first_model_s():
    """Of tokens, (T, N): where the model is not said to be time-first, its T is taken for the batch."""

    class Characters(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(9, 3), nn.GRU(3, 4), nn.Linear(4, 9)

        def forward(self, x):
            return self.head(self.inner(self.table(x))[0])

    def step(**options):
        wrapped = GradSampleModuleFastGradientClipping(Characters(), **options)
        wrapped(torch.randint(0, 9, (7, 5))).square().mean((0, 2)).mean().backward()
        return wrapped.get_norm_sample().shape

    with pytest.raises(UnsupportedModuleError, match="or batch_first=False, where samples are in dimension 1"):
        step()
    assert step(batch_first=False) == (5,)
