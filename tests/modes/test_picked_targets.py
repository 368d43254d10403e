"""``F.cross_entropy`` over targets that were picked out of the batch, as masked language models do it."""

import pytest
import torch
import torch.nn.functional as F
from cases import clipped_as_told
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

N, T, D, V, C = 4, 6, 5, 10, 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, V))


def by_mask(logits, mask):
    return logits[mask]


def by_flat_mask(logits, mask):
    return logits.flatten(0, 1)[mask.flatten()]


def by_numbers(logits, mask):
    return logits.view(-1, V).index_select(0, mask.flatten().nonzero()[:, 0])


def by_pairs(logits, mask):
    return logits[mask.nonzero(as_tuple=True)]


def by_masked_select(logits, mask):
    return torch.masked_select(logits, mask[..., None]).view(-1, V)


PICKS = [by_mask, by_flat_mask, by_numbers, by_pairs, by_masked_select]


def mask_of(*lengths):
    return torch.arange(T)[None] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("pick", PICKS)
def test_a_mean_over_different_numbers_is_refused(pick, batch_first):
    """12 targets, 3 a sample in the mean: their number does not show it."""
    mask, labels = mask_of(1, 3, 6, 2), torch.randint(0, V, (N, T))
    inputs = torch.randn(N, T, D)
    if not batch_first:
        mask, labels, inputs = mask.t(), labels.t(), inputs.transpose(0, 1)
    wrapped = GradSampleModuleFastGradientClipping(net(), max_grad_norm=C, batch_first=batch_first)
    logits = wrapped(inputs).contiguous()
    loss = F.cross_entropy(pick(logits, mask), labels[mask])
    with pytest.raises(UnsupportedModuleError, match=r"picked and not left out .*different numbers of them \(1 to 6\)"):
        loss.backward()


@pytest.mark.parametrize("pick", PICKS)
def test_as_many_of_each_sample(pick):
    inputs, labels = torch.randn(N, T, D), torch.randint(0, V, (N, T))
    mask = mask_of(3, 3, 3, 3)[:, torch.randperm(T)]

    def mean(model, inputs, labels, mask):
        return F.cross_entropy(pick(model(inputs), mask), labels[mask])

    model = net()
    exact = loop_over_samples(model, mean, inputs, labels, mask)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    mean(wrapped, inputs, labels, mask).backward()
    for name, total in clipped_as_told(wrapped.get_clipping_coef(), exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, mask: F.cross_entropy(logits[torch.arange(N), mask.sum(1) - 1], labels[:, 0]),
        lambda logits, labels, mask: F.cross_entropy(logits[:, [0, 2]].flatten(0, 1), labels[:, [0, 2]].flatten()),
        lambda logits, labels, mask: F.cross_entropy(logits[mask], labels[mask], reduction="sum"),
        lambda logits, labels, mask: F.cross_entropy(logits[mask], labels[mask], reduction="none").sum(),
        lambda logits, labels, mask: F.cross_entropy(logits[torch.randperm(N)].flatten(0, 1), labels.flatten()),
    ],
    ids=["the last of each", "columns", "a sum", "none", "shuffled"],
)
def test_what_divides_by_no_others_is_taken(loss):
    wrapped = GradSampleModuleFastGradientClipping(net(), max_grad_norm=C)
    loss(wrapped(torch.randn(N, T, D)), torch.randint(0, V, (N, T)), mask_of(1, 3, 6, 2)).backward()
    assert all(p.grad is not None for p in wrapped.parameters())
