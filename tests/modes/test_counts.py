"""Losses outside of the model that are means over what samples have different numbers of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

N, T, D, C = 4, 4, 5, 3
UNEVEN = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)  # (N, T)
EVEN = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))


def wrapped(**options):
    return dpfast.GradSampleModuleFastGradientClipping(network(), **options)


def own(y):
    return y.square().mean(-1)  # (N, T)


PICKED = {
    "losses": lambda y, mask: own(y)[mask].mean(),
    "losses in one row": lambda y, mask: own(y).flatten()[mask.flatten()].mean(),
    "losses by number": lambda y, mask: own(y).view(-1).index_select(0, mask.flatten().nonzero()[:, 0]).mean(),
    "losses by masked_select": lambda y, mask: own(y).masked_select(mask).mean(),
    "outputs": lambda y, mask: F.mse_loss(y[mask], torch.ones(int(mask.sum()), C)),
    "outputs by two numbers": lambda y, mask: F.smooth_l1_loss(
        y[mask.nonzero(as_tuple=True)], torch.ones(C).expand(int(mask.sum()), C)
    ),
    "logits": lambda y, mask: F.binary_cross_entropy_with_logits(y[..., 0][mask], torch.ones(int(mask.sum()))),
    "cross entropies by temperature": lambda y, mask: F.cross_entropy(
        y[mask] / 2.0, torch.ones(int(mask.sum()), dtype=torch.int64)
    ),
    "rows of losses": lambda y, mask: (y[mask] - 1.0).abs().mean(-1).mean(),
    "samples": lambda y, mask: own(y).mean(1)[mask.sum(1) > 1].mean(),
}
DIVIDED = {
    "a mask": lambda y, mask: (own(y) * mask).sum() / mask.sum(),
    "a mask of numbers": lambda y, mask: (mask.float() * own(y)).sum() / mask.float().sum().clamp(min=1),
    "a number": lambda y, mask: (own(y) * mask).sum() / int(mask.sum()),
    "divided first": lambda y, mask: (own(y) * mask / mask.sum()).sum(),
    "among steps": lambda y, mask: (own(y) * mask).sum() / mask.sum() / 8,
    "means": lambda y, mask: (own(y) * mask).mean() / mask.float().mean(),
    "one row": lambda y, mask: (own(y).flatten() * mask.flatten()).sum() / mask.sum(),
    "filled": lambda y, mask: own(y).masked_fill(~mask, 0.0).sum() / mask.sum(),
    "where": lambda y, mask: torch.where(mask, own(y), 0.0).sum() / mask.sum(),
    "where not": lambda y, mask: torch.where(~mask, 0.0, own(y)).sum() / mask.sum(),
    "picked": lambda y, mask: own(y)[mask].sum() / mask.sum(),
    "cross entropies": lambda y, mask: (
        F.cross_entropy(y.flatten(0, 1), torch.where(mask, 1, -100).flatten(), reduction="sum") / mask.sum()
    ),
    "outputs": lambda y, mask: F.l1_loss(y * mask[..., None], torch.zeros_like(y), reduction="sum") / (C * mask.sum()),
}
EACH = {
    "each one's own mean": lambda y, mask: ((own(y) * mask).sum(1) / mask.sum(1)).mean(),
    "each one's own mean, one by one": lambda y, mask: sum(own(y)[i][mask[i]].mean() for i in range(len(y))) / len(y),
    "each one's own mean, by number": lambda y, mask: (
        sum(own(y)[torch.tensor([i])].flatten()[mask[i]].mean() for i in range(len(y))) / len(y)
    ),
    "a sum of what was picked": lambda y, mask: (
        F.mse_loss(y[mask], y.new_zeros(int(mask.sum()), C), reduction="sum") / len(y)
    ),
    "each one's own mean, by division": lambda y, mask: (
        sum((x * m).sum() / m.sum() for x, m in zip(own(y).unbind(), mask, strict=True)) / len(y)
    ),
    "an action of each": lambda y, mask: F.mse_loss(
        y[torch.arange(len(y)), torch.full((len(y),), 2)], y.new_zeros(len(y), C)
    ),
    "classes": lambda y, mask: y[..., torch.tensor([True, False, True])].square().mean(),
    "each one's own cross entropy": lambda y, mask: torch.stack(
        [F.cross_entropy(x, torch.where(m, 1, -100)) for x, m in zip(y, mask, strict=True)]
    ).mean(),
    "a number that no batch changes": lambda y, mask: (own(y) * mask).sum() / (T * len(y)),
    "positions of all": lambda y, mask: own(y)[:, torch.tensor([0, 2])].mean(),
    "weights of positions": lambda y, mask: (own(y) * torch.arange(1.0, T + 1)).sum() / 10.0 / len(y),
}


@pytest.mark.parametrize("name", PICKED)
def test_a_mean_of_what_was_picked_is_refused(name):
    private, x = wrapped(), torch.randn(N, T, D)
    PICKED[name](private(x), EVEN).backward()
    private.zero_grad()
    mask = EVEN.logical_or(torch.arange(N)[:, None] == 1)
    with pytest.raises(UnsupportedModuleError, match=r"different numbers of them \(\d to \d\)"):
        PICKED[name](private(x), UNEVEN if name == "samples" else mask).backward()


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sum_divided_by_what_a_mask_leaves_is_refused_when_seen_again(name):
    private, x = wrapped(), torch.randn(N, T, D)
    DIVIDED[name](private(x), EVEN).backward()
    private.zero_grad()
    with pytest.warns(DpfastWarning, match=r"divided by .*, as much as a mask leaves of all 4 samples' entries"):
        DIVIDED[name](private(x), UNEVEN).backward()
    for _ in range(2):  # whoever tries again
        private.zero_grad()
        with pytest.raises(UnsupportedModuleError, match=r"different numbers of them \((1 to 3|3 to 9)\)"):
            DIVIDED[name](private(x), UNEVEN & (torch.arange(T) != 1)).backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", EACH)
def test_each_samples_own_mean_is_right(name):
    """With as many positions as samples."""
    model, x = network(), torch.randn(N, T, D)
    exact = norms_of(loop_over_samples(model, lambda m, x, mask: EACH[name](m(x), mask), x, UNEVEN))
    private = wrapped()
    for mask in (UNEVEN, EVEN, UNEVEN):
        private.zero_grad()
        EACH[name](private(x), mask).backward()
    assert relative_error(private.get_norm_sample(), exact) <= 1e-5


@pytest.mark.filterwarnings("error")
def test_the_batchs_size_is_no_count_of_a_masks():
    private, x = wrapped(), torch.randn(N, T, D)
    for i in range(3):
        private.zero_grad()
        mask = torch.zeros(N, T)
        mask[i] = 1.0  # as many as samples, all of one
        ((own(private(x)) * mask).sum() / N).backward()


def test_a_divisor_that_stays_is_no_count():
    """Where a mask leaves as much by accident."""
    private, x = wrapped(), torch.randn(N, T, D)
    with pytest.warns(DpfastWarning, match="divided by 10, as much as a mask leaves"):
        ((own(private(x)) * UNEVEN).sum() / 10).backward()
    for mask in (UNEVEN, UNEVEN & (torch.arange(T) > 0), EVEN, UNEVEN):
        private.zero_grad()
        ((own(private(x)) * mask).sum() / 10).backward()


def test_a_count_that_16_bits_round_is_a_count():
    lengths = torch.tensor([300, 201, 7, 1])
    private, x = wrapped(), torch.randn(N, 300, D)
    mask = (torch.arange(300) < lengths[:, None]).bfloat16()
    assert float(mask.sum()) != float(lengths.sum())
    with pytest.warns(DpfastWarning, match="as much as a mask leaves"):
        ((own(private(x)) * mask).sum() / mask.sum()).backward()
