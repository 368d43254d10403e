"""Layers with several rows a sample, where the first batches have one: it is learned once more."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C, CHUNK = 0.3, 4


class Chunks(nn.Module):
    """Documents (N, T, D), cut in chunks of four tokens: k = ceil(T / 4) rows each."""

    def __init__(self, together=True):
        super().__init__()
        self.first, self.last, self.together = nn.Linear(5, 6), nn.Linear(6, 3), together

    def forward(self, x):
        n, t, d = x.shape
        k = -(-t // CHUNK)
        x = F.pad(x, (0, 0, 0, k * CHUNK - t)).view(n, k, CHUNK, d)
        rows = (x if self.together else x.transpose(0, 1)).reshape(n * k, CHUNK, d)
        found = self.chunk(self.first(rows).tanh().sum(1), k)
        found = found.view(n, k, 6) if self.together else found.view(k, n, 6).transpose(0, 1)
        return self.last(found.mean(1))

    def chunk(self, rows, k):
        return rows


class OnesOfSeveralMeet(Chunks):
    def chunk(self, rows, k):
        return rows if k == 1 else rows - rows.mean(0)


def loss_of(model, x):
    return model(x).square().sum()


@pytest.mark.parametrize("lengths", [(3, 7, 8, 3, 12), (7, 3, 8, 4, 12), (4, 4, 4, 4, 9, 4, 3)])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("per_sample", [False, True])
def test_right_for_every_length(per_sample, together, lengths):
    torch.manual_seed(0)
    model = Chunks(together)
    plain = copy.deepcopy(model)
    if per_sample:
        wrapped = GradSampleModule(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C)
    for n, t in zip((4, 4, 3, 5, 2, 4, 4), lengths, strict=False):
        x = torch.randn(n, t, 5)
        exact = loop_over_samples(plain, loss_of, x)
        wrapped.zero_grad()
        loss_of(wrapped, x).backward()
        expected = exact if per_sample else clipped_sum(exact, C)
        if not per_sample:
            assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) < 1e-4
        for name, p in model.named_parameters():
            assert relative_error(p.grad_sample if per_sample else p.grad, expected[name]) < 1e-4, (t, name)


@pytest.mark.parametrize("lengths", [(3, 7), (3, 3, 3, 8), (4, 4, 4, 4, 12)])
def test_rows_that_meet_later_are_refused(lengths):
    torch.manual_seed(0)
    wrapped = GradSampleModuleFastGradientClipping(OnesOfSeveralMeet(), loss_reduction="sum", max_grad_norm=C)
    *first, last = lengths
    for t in first:
        loss_of(wrapped, torch.randn(4, t, 5)).backward()
    with pytest.raises(DpfastError):
        loss_of(wrapped, torch.randn(4, last, 5)).backward()
