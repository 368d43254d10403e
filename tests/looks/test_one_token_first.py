"""Time-first tokens of length 1, (1, N): their 1 is no batch of one that is broadcast, as that of positions is."""

import copy

import pytest
import torch
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, InputError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.01


class Tokens(nn.Module):
    """(N, T), turned time-first inside."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(9, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, ids, generator=None):
        return self.last(self.first(self.table(ids.t())).tanh()).sum(0)


class Recurrent(Tokens):
    def __init__(self):
        super().__init__()
        self.first = nn.GRU(5, 7)

    def forward(self, ids):
        return self.last(self.first(self.table(ids.t()))[1][0])


class OneByOne(Recurrent):
    def forward(self, ids):
        state = None
        for t in range(ids.shape[1]):
            _, state = self.first(self.table(ids[:, t][None]), state)
        return self.last(state[0])


class WithPositions(Tokens):
    """Positions (1, T), of which each sample has the same."""

    def forward(self, ids, positions):
        x = self.table(ids) + self.table(positions)
        return self.last(self.first(x).tanh()).sum(1)


def squared(model, *inputs):
    return model(*inputs).pow(2).sum()


def assert_as_the_loop(model, plain, *inputs, tolerance=1e-4):
    exact = loop_over_samples(plain, lambda m, x: squared(m, x, *inputs[1:]), inputs[0])
    model.zero_grad()
    output = model(*inputs)
    torch.testing.assert_close(output, plain(*inputs))
    output.pow(2).sum().backward()
    if not isinstance(model, GradSampleModuleFastGradientClipping):
        for name, p in model._module.named_parameters():
            assert relative_error(p.grad_sample, exact[name]) < tolerance, name
    else:
        assert relative_error(model.get_norm_sample(), norms_of(exact)) < tolerance
        for name, total in clipped_sum(exact, C).items():
            assert relative_error(model._module.get_parameter(name).grad, total) < tolerance, name


def wrapped(model, how, **options):
    if how == "grad_sample":
        return GradSampleModule(model, loss_reduction="sum", **options)
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", **options)


@pytest.mark.parametrize("how", ["clipped", "grad_sample"])
@pytest.mark.parametrize("lengths", [(1,), (6, 1), (4, 1, 6)])
@pytest.mark.parametrize("kind", [Tokens, Recurrent, OneByOne])
def test_tokens_of_length_one(kind, lengths, how):
    """They were expanded to (N, N): outputs and gradients were other numbers, without a word."""
    torch.manual_seed(0)
    plain = kind()
    model = wrapped(copy.deepcopy(plain), how)
    for t in lengths:
        assert_as_the_loop(model, plain, torch.randint(0, 9, (4, t)))


@pytest.mark.parametrize("how", ["clipped", "grad_sample"])
@pytest.mark.parametrize("lengths", [(4, 6, 1), (1, 4), (6, 4)])
def test_positions_are_expanded_whatever_their_number(lengths, how):
    torch.manual_seed(0)
    plain = WithPositions()
    model = wrapped(copy.deepcopy(plain), how)
    for t in lengths:
        assert_as_the_loop(model, plain, torch.randint(0, 9, (4, t)), torch.arange(t)[None])


@pytest.mark.parametrize("n", [4, 2])
def test_without_a_look_it_is_asked_for(n):
    """(1, N) may be N tokens or positions, where a model cannot be run to find out."""
    torch.manual_seed(0)
    plain, generator = Tokens(), torch.Generator()
    ids = torch.randint(0, 9, (n, 1))
    model = wrapped(copy.deepcopy(plain), "clipped")
    with pytest.raises(InputError, match=r"table .*are samples in dimension 0 of its output \(1, \d, 5\).*layout="):
        model(ids, generator)
    told = wrapped(copy.deepcopy(plain), "clipped", layout={"table": 1, "first": 1, "last": 1})
    with pytest.warns(DpfastWarning, match="taken on trust"):
        assert_as_the_loop(told, plain, ids, generator)
