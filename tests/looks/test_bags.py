"""Bags of an EmbeddingBag in one row, by offsets: looks exchange bags."""

import copy
import warnings

import pytest
import torch
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError, DpfastWarning
from dpfast.testing import clipped_sum, norms_of, relative_error

C = 0.3


class Words(nn.Module):
    def __init__(self, mix=lambda h, words: h, **options):
        super().__init__()
        self.bags, self.head, self.mix = nn.EmbeddingBag(20, 6, **options), nn.Linear(6, 3), mix

    def forward(self, words, offsets, weights=None):
        return self.head(torch.tanh(self.mix(self.bags(words, offsets, weights), words)))


class Clicks(nn.Module):
    """As DLRM: numbers (N, 4) and a bag of each of several fields, of which two have the same offsets."""

    def __init__(self, mix=lambda h: h):
        super().__init__()
        self.dense, self.mix = nn.Linear(4, 5), mix
        self.fields = nn.ModuleList(nn.EmbeddingBag(9, 5, mode="sum") for _ in range(3))
        self.top = nn.Linear(20, 1)

    def forward(self, numbers, fields, offsets):
        # The second field comes long before its bag, and not as it is.
        some = [torch.relu(self.dense(numbers))]
        some += [bag(x.remainder(9), o) for bag, x, o in zip(self.fields, fields, offsets, strict=True)]
        return self.top(self.mix(torch.cat(some, 1)))[:, 0]


class ClicksAsTheyAre(Clicks):
    def forward(self, fields, offsets, numbers):
        some = [torch.relu(self.dense(numbers))]
        some += [bag(x, o) for bag, x, o in zip(self.fields, fields, offsets, strict=True)]
        return self.top(self.mix(torch.cat(some, 1)))[:, 0]


def starts(lengths, *, ended=False):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends if ended else ends[:-1]


def alone(model, sample, number):
    """{name: (N, *shape)} by a loop over what ``sample(n)`` gives, in fp64."""
    model = copy.deepcopy(model).double()
    found = {name: [] for name, _ in model.named_parameters()}
    for n in range(number):
        model.zero_grad()
        model(*sample(n)).square().sum().backward()
        for name, p in model.named_parameters():
            found[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(g) for name, g in found.items()}


def assert_clipped(model, batch, exact, **options):
    """One private pass, without a warning."""
    for wrapper in (GradSampleModuleFastGradientClipping, GradSampleModule):
        net = copy.deepcopy(model)
        more = {"max_grad_norm": C} if wrapper is GradSampleModuleFastGradientClipping else {}
        wrapped = wrapper(net, loss_reduction="sum", **more, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):  # looks of both kinds
                wrapped.zero_grad()
                wrapped(*batch).square().sum().backward()
        if more:
            assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
            for name, g in clipped_sum(exact, C).items():
                assert relative_error(net.get_parameter(name).grad, g) <= 1e-4, name
        else:
            for name, g in exact.items():
                assert relative_error(net.get_parameter(name).grad_sample, g) <= 1e-5, name


LENGTHS = [[3], [0, 2], [1, 1, 1], [2, 2, 2, 2, 2], [1, 5, 0, 1, 1, 4, 0, 3, 2]]
OPTIONS = [{"mode": "sum"}, {"mode": "mean", "padding_idx": 2}, {"mode": "max"}, {"include_last_offset": True}]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_bags_are_samples_without_a_warning(lengths, options):
    model, ended = Words(**options), "include_last_offset" in options
    words, offsets = torch.randint(0, 20, (sum(lengths),)), starts(lengths, ended=ended)
    parts = words.split(lengths)
    exact = alone(model, lambda n: (parts[n], starts([len(parts[n])], ended=ended)), len(lengths))
    assert_clipped(model, (words, offsets), exact)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_weights_go_with_their_bags(lengths):
    model = Words(mode="sum")
    words, weights = torch.randint(0, 20, (sum(lengths),)), torch.randn(sum(lengths))
    parts, own = words.split(lengths), weights.double().split(lengths)
    exact = alone(model, lambda n: (parts[n], torch.tensor([0]), own[n]), len(lengths))
    assert_clipped(model, (words, starts(lengths), weights), exact)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("make", [Clicks, ClicksAsTheyAre])
def test_several_fields_of_bags(make, n):
    model, numbers = make(), torch.randn(n, 4)
    one, other = [3, 0, 1, 4, 1, 1, 2, 0, 3][:n], [2, 3, 2, 0, 1, 3, 0, 2, 1][:n]
    fields = [torch.randint(0, 9, (sum(some),)) for some in (one, other, other)]
    first, second = starts(one), starts(other)
    parts = [x.split(some) for x, some in zip(fields, (one, other, other), strict=True)]

    def call(numbers, fields, offsets):
        return (numbers, fields, offsets) if make is Clicks else (fields, offsets, numbers)

    def sample(i):
        zero = torch.tensor([0])
        return call(numbers[i : i + 1].double(), [x[i] for x in parts], [zero, zero, zero])

    batch = call(numbers, fields, [first, second, second])
    if make is Clicks:  # of which field its entries were made cannot be told
        wrapped = GradSampleModule(model, loss_reduction="sum")
        with pytest.warns(DpfastWarning, match="on trust"):
            wrapped(*batch)
        return
    assert_clipped(model, batch, alone(model, sample, n))


MIXES = {
    "mean over the batch": lambda h, words: h - h.mean(0),
    "how many entries all have": lambda h, words: h / len(words),
    "the largest": lambda h, words: h / (1.0 + h.detach().abs().max()),
    "another bag": lambda h, words: h + h.roll(1, 0),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", [[3, 1, 6, 2], [1, 1, 1]])
def test_bags_that_are_mixed_are_refused(name, options, lengths):
    model = Words(MIXES[name], **options)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    words, offsets = torch.randint(0, 20, (sum(lengths),)), starts(lengths, ended="include_last_offset" in options)
    with pytest.raises(DpfastError, match="sample"):
        wrapped(words, offsets).square().sum().backward()


@pytest.mark.parametrize("n", [3, 8])
def test_fields_that_are_mixed_are_refused(n):
    model = ClicksAsTheyAre(lambda h: h - h.mean(0))
    fields, offsets = [torch.randint(0, 9, (2 * n,)) for _ in range(3)], starts([2] * n)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(DpfastError, match="samples meet in top"):
        wrapped(fields, [offsets, offsets, offsets], torch.randn(n, 4)).square().sum().backward()


def test_mixed_where_a_frozen_table_has_the_bags():
    model = Words(lambda h, words: h - h.mean(0))
    model.bags.requires_grad_(False)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(DpfastError):
        wrapped(torch.randint(0, 20, (9,)), torch.tensor([0, 3, 4])).square().sum().backward()


class OfNumbers(Words):
    """Reads values, so it does not run on fake tensors."""

    def forward(self, words, offsets, weights=None):
        h = super().forward(words, offsets, weights)
        return h * 2 if float(words.sum()) >= 0 else h


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_model_that_looks_at_values(lengths):
    model = OfNumbers(mode="sum")
    words = torch.randint(0, 20, (sum(lengths),))
    parts = words.split(lengths)
    exact = alone(model, lambda n: (parts[n], torch.tensor([0])), len(lengths))
    assert_clipped(model, (words, starts(lengths)), exact)
    mixing = OfNumbers(lambda h, words: h - h.mean(0))
    if len(lengths) > 1:
        with pytest.raises(DpfastError, match="sample"):
            GradSampleModuleFastGradientClipping(mixing)(words, starts(lengths)).sum().backward()


class Together(nn.Module):
    """The offsets of two fields in one tensor (2, N)."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.EmbeddingBag(9, 5), nn.EmbeddingBag(9, 5), nn.Linear(5, 2)

    def forward(self, words, more, offsets):
        return self.head(self.one(words, offsets[0]) + self.other(more, offsets[1]))


def test_offsets_that_are_a_part_of_an_input_are_on_trust_and_said():
    lengths = [3, 1, 2, 2]
    model, words, more = Together(), torch.randint(0, 9, (8,)), torch.randint(0, 9, (8,))
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.warns(DpfastWarning, match="by offsets that are a part of an input"):
        wrapped(words, more, torch.stack([starts(lengths)] * 2))
