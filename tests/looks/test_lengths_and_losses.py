"""The same of lengths that the model counts, and of losses that it makes."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from of_lengths import (
    CHANGES,
    RIGHT,
    WRONG,
    C,
    Model,
    T,
    assert_right_in,
    batch,
    by_sample,
    gradients,
    masked_mean,
    mean,
    one_pass,
    padded,
    states,
    valid,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


# --- lengths that the model counts ---


class Counting(nn.Module):
    """Counts what is no padding, in its tokens or in a mask."""

    def __init__(self, way):
        super().__init__()
        self.inner = Model(way)

    def forward(self, tokens, mask, classes):
        lengths = (tokens != 0).sum(1) if mask is None else torch.tensor(mask.sum(1).tolist())
        return self.inner(tokens, lengths, classes)


class Sorting(Model):
    """Counts and sorts."""

    def forward(self, tokens, mask, classes):
        lengths, order = (tokens != 0).sum(1).sort(descending=True)
        back = order.argsort()
        out, _ = self.rnn(pack_padded_sequence(self.table(tokens)[order], lengths.cpu(), batch_first=True))
        return self.way(self, padded(self, out)[back], lengths[back])


def counted(model, tokens, mask, classes):
    out = model(tokens, mask, classes)
    if out.dim() == 3:
        out = out * (tokens[:, : out.shape[1]] != 0).unsqueeze(-1)
    return (3 * out).sin().flatten(1).sum(1)


def counted_batch(masked):
    tokens, lengths, classes = batch()
    return tokens, (torch.arange(T) < lengths[:, None]) if masked else None, classes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "way", ["mean of its own", "tokens of all", "attention", "mask of the longest", "total_length"]
)
def test_counted_lengths(way, masked):
    plain, inputs = Counting(RIGHT[way]), counted_batch(masked)
    exact = loop_over_samples(plain, lambda *some: counted(*some).sum(), *inputs)
    assert_right_in("one pass", plain, counted, exact, *inputs)


def of_own_sorted(model, x, lengths):
    return model.head(x)


def of_all_sorted(model, x, lengths):
    return model.head(x * (lengths / lengths.max())[:, None, None])


def test_counted_lengths_by_which_the_model_sorts():
    plain, inputs = Sorting(of_own_sorted), counted_batch(masked=False)
    exact = loop_over_samples(plain, lambda *some: counted(*some).sum(), *inputs)
    assert_right_in("one pass", plain, counted, exact, *inputs)
    with pytest.raises(UnsupportedModuleError, match=CHANGES):
        counted(one_pass(Sorting(of_all_sorted)), *inputs).sum().backward()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way", ["mean", "maximum", "relative positions"])
def test_counted_lengths_of_which_the_longest_changes_others(way, masked):
    model = one_pass(Counting(WRONG[way]))
    with pytest.raises(UnsupportedModuleError, match=CHANGES):
        counted(model, *counted_batch(masked)).sum().backward()


# --- losses that the model makes ---


def loss_of_own(model, out, state, lengths, classes):
    logits = model.head(masked_mean(model.mid(padded(model, out)), lengths))
    return F.cross_entropy(logits, classes)


def loss_of_tokens(model, out, state, lengths, classes):
    """Each sample's own mean over its own."""
    logits = model.head(model.mid(padded(model, out)))
    losses = F.cross_entropy(logits.transpose(1, 2), classes[:, None].expand(logits.shape[:2]), reduction="none")
    return masked_mean(losses.unsqueeze(-1), lengths).mean()


def loss_of_all_positions(model, out, state, lengths, classes):
    logits = model.head(model.mid(padded(model, out)))
    return F.cross_entropy(logits.flatten(0, 1), classes.repeat_interleave(logits.shape[1]))


def loss_by_all_tokens(model, out, state, lengths, classes):
    logits = model.head(model.mid(padded(model, out)))
    losses = F.cross_entropy(logits.transpose(1, 2), classes[:, None].expand(logits.shape[:2]), reduction="none")
    return (losses.unsqueeze(-1) * valid(logits, lengths)).sum() / lengths.sum()


def whole_loss(model, *inputs):
    return model(*inputs)


def moved_in_loss(plain):
    """What stands above, of a mean over samples: what the batch of the five gives, and the longest alone."""
    inputs, rest, longest = batch(), torch.tensor([0, 2, 3, 4, 5]), torch.tensor([1])
    whole, five, alone = (
        gradients(plain, whole_loss, *(x[some] for x in inputs)) * len(some)
        for some in (torch.arange(6), rest, longest)
    )
    return float((whole - five - alone).norm() / whole.norm())


def mean_loss(model):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C)


@pytest.mark.parametrize("way", [loss_of_own, loss_of_tokens])
def test_losses_of_the_model_that_leave_padding_out(way):
    plain = Model(way)
    assert moved_in_loss(plain) <= 1e-12
    exact = clipped_sum(loop_over_samples(plain, whole_loss, *batch()), C)
    model = mean_loss(copy.deepcopy(plain))
    model(*batch()).backward()
    for name, p in model._module.named_parameters():
        if p.grad is not None:
            assert relative_error(p.grad, exact[name]) <= 1e-5, name


@pytest.mark.parametrize("way", [loss_of_all_positions, loss_by_all_tokens])
def test_losses_of_the_model_that_do_not(way):
    plain = Model(way)
    assert moved_in_loss(plain) >= 1e-2
    with warnings.catch_warnings(), pytest.raises(UnsupportedModuleError, match=rf"output 0 of the model.*{CHANGES}"):
        warnings.filterwarnings("ignore", "the loss is divided by")  # said before it is refused
        mean_loss(plain)(*batch()).backward()


def test_a_loss_that_is_kept_and_depends_on_the_longest():
    def way(model, out, state, lengths, classes):
        x = model.mid(padded(model, out))
        model.loss = x.mean((0, 1)).sum()
        return model.head(masked_mean(x, lengths))

    by_sample(one_pass(Model(way)), *batch()).sum().backward()
    model = one_pass(Model(way))
    out = by_sample(model, *batch()).sum()
    with pytest.raises(UnsupportedModuleError, match=rf"loss, an attribute of the model.*{CHANGES}"):
        (out + model._module.loss).backward()


def test_one_output_of_two():
    def way(model, out, state, lengths, classes):
        return mean(model, out, state, lengths, classes), states(model, out, state, lengths, classes)

    one_pass(Model(way))(*batch())[1].sin().sum().backward()
    with pytest.raises(UnsupportedModuleError, match=rf"output 0 of the model.*{CHANGES}"):
        one_pass(Model(way))(*batch())[0].sin().sum().backward()
