"""Outputs of one node of autograd's, as cuDNN's recurrent layers have them: where a gradient comes to one, the hooks of
the others are called too, with None."""

import like_cudnn
import of_lengths
import pytest
import torch
from outputs_beside import BESIDE, D, H, by_all, by_sample, padded, refused, right
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")  # nothing is taken on trust


@pytest.fixture
def as_cudnn(monkeypatch):
    like_cudnn.put_in_place(monkeypatch)


OF_ONE_NODE = ("LSTM", "GRU", "RNN", "LSTM's c", "both outputs", "both directions", "packed")


@pytest.mark.parametrize("name", OF_ONE_NODE)
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_recurrent_layers_as_cudnn_has_them(name, wrapper, as_cudnn):
    torch.manual_seed(0)
    refused(BESIDE[name](by_all), padded(), wrapper=wrapper)
    right(BESIDE[name](by_sample), padded())


def test_states_of_packed_sequences_of_both_directions(as_cudnn):
    """Which cuDNN wants in one piece."""

    def model(way):
        return of_lengths.Model(way, **of_lengths.CELLS["lstm, both directions"])

    inputs, plain = of_lengths.batch(), model(of_lengths.mean_of_own)
    exact = loop_over_samples(plain, of_lengths.loss, *inputs)
    of_lengths.assert_right_in("one pass", plain, of_lengths.by_sample, exact, *inputs)
    wrong = of_lengths.one_pass(model(of_lengths.mean))
    with pytest.raises(UnsupportedModuleError, match=of_lengths.CHANGES):
        of_lengths.by_sample(wrong, *inputs).sum().backward()


class Halves(nn.Linear):
    def forward(self, x):
        return super().forward(x).chunk(2, -1)


class OneOfTwo(nn.Module):
    """Of what a layer gives as one node's outputs, one is used."""

    def __init__(self, hook, which, reentrant):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(D, D), Halves(D, 2 * H), nn.Linear(H, 3)
        self.hook, self.which, self.reentrant = hook, which, reentrant

    def used(self, x):
        found = self.layer(x)[self.which]
        if found.requires_grad:
            found.register_hook(self.hook)
        return torch.tanh(found)

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            return self.head(self.used(x))
        return self.head(checkpoint(self.used, x, use_reentrant=self.reentrant))


class Nothing(torch.autograd.Function):
    """With no gradient, by None."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return None


class PartlyUsed(nn.Module):
    """Of what another layer gives, no gradient comes back."""

    def __init__(self, hook):
        super().__init__()
        self.first, self.other, self.head, self.hook = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, 3), hook

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(self.hook)
        return self.head(torch.tanh(h) + Nothing.apply(self.other(x)))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_where_one_output_of_two_is_used(which, reentrant):
    torch.manual_seed(0)
    refused(OneOfTwo(by_all, which, reentrant))
    right(OneOfTwo(by_sample, which, reentrant))


def test_where_a_function_gives_no_gradient():
    torch.manual_seed(0)
    refused(PartlyUsed(by_all))
    right(PartlyUsed(by_sample))
