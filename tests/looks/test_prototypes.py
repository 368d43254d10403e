"""A layer of samples that runs on K rows without samples too (prototypes, texts of classes), where K is as many as the
samples of a look by accident."""

import pytest
import torch
from torch import nn
from two_linears import C, D, clipping

from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

BATCHES = (5, 9, 10)  # of a look at the first are 3 and all 5 samples, of one at the second 4, of later ones 8


class Prototypes(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.first, self.last, self.rows = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.randn(k, D))

    def encoded(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x):
        return torch.tanh(self.encoded(x)) @ self.encoded(self.rows).T


class Texts(Prototypes):
    """Of classes, the same for all samples."""

    def __init__(self, k):
        super().__init__(k)
        self.table = nn.Embedding(7, D)
        self.register_buffer("texts", torch.arange(4 * k).reshape(k, 4) % 7)

    def forward(self, x):
        return torch.tanh(self.encoded(x)) @ self.encoded(self.table(self.texts).mean(1) + self.rows).T


class OfTheBatch(Prototypes):
    """They follow the mean of the batch."""

    def forward(self, x):
        return torch.tanh(self.encoded(x)) @ self.encoded(self.rows + x.mean(0)).T


class Attend(Prototypes):
    """They look at the batch, and samples at them."""

    def forward(self, x):
        h = self.encoded(x)
        return h @ self.encoded(torch.softmax(self.encoded(self.rows) @ h.T, 1) @ h).T


def squared(model, x):
    return model(x).square().sum()


@pytest.mark.parametrize("k", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("cls", [Prototypes, Texts])
def test_as_many_as_the_samples_of_a_look(cls, k):
    torch.manual_seed(k)
    wrapped = clipping(model := cls(k))
    for n in (*BATCHES, k, *BATCHES, 9):
        x = torch.randn(n, D)
        wrapped.zero_grad()
        squared(wrapped, x).backward()
        exact = clipped_sum(loop_over_samples(model_of(model), squared, x), C)
        for name, p in model.named_parameters():
            assert relative_error(p.grad, exact[name]) < 1e-4, (n, name)


def model_of(model):
    """An ordinary one of the same numbers."""
    plain = type(model)(len(model.rows))
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("k", [3, 4, 5, 8])
@pytest.mark.parametrize("cls", [OfTheBatch, Attend])
def test_that_see_the_batch_are_refused(cls, k):
    wrapped = clipping(cls(k))
    for n in (k, 9, k):
        with pytest.raises(UnsupportedModuleError, match="samples"):
            squared(wrapped, torch.randn(n, D)).backward()
