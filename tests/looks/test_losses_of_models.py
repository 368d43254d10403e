"""Models that return their loss: samples that meet behind the last layer show in that loss's gradients alone."""

import logging

import pytest
import torch
import torch.nn.functional as F
from noted import Noted
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

D = 4


class WithLoss(nn.Module):
    """Layers, and a loss of what they give."""

    def __init__(self, loss, returns="loss", around=None):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.loss, self.returns, self.around = loss, returns, around or (lambda f, x: f(x))

    def forward(self, x):
        h = self.second(torch.tanh(self.around(self.first, x)))
        loss = self.loss(h)
        return {"loss": loss, "both": (loss, h), "in a dict": {"loss": loss[None], "logits": h}}[self.returns]


MIXING = {
    "less the mean": lambda h: (h - h.mean(0)).square().mean(),
    "over the batch's spread": lambda h: (h / h.std()).pow(3).mean(),
    "a norm of all": lambda h: h.norm(),
    "nearly the worst": lambda h: h.flatten(1).square().sum(1).logsumexp(0),
    "weighted by each other": lambda h: (h.flatten(1).square().sum(1).softmax(0) * h.flatten(1).sum(1)).sum(),
    "pairs": lambda h: torch.cdist(h.flatten(1), h.flatten(1)).mean(),
    "neighbours": lambda h: (h[1:] - h[:-1]).square().mean() + h.square().mean(),
}
FINE = {
    "mean": lambda h: h.square().mean(),
    "sum of two": lambda h: h.square().mean() + 0.1 * h.cos().mean(),
    "likelihood": lambda h: F.cross_entropy(h.flatten(0, -2), torch.zeros(h.shape[:-1], dtype=torch.long).flatten()),
}
AROUND = {
    "plain": None,
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
}


@pytest.mark.parametrize("shape", [(1, D), (2, D), (D, D), (D, D, D), (5, 3, D)], ids=str)
@pytest.mark.parametrize("returns", ["loss", "both", "in a dict"])
@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_samples_within_the_model_is_refused(name, returns, shape):
    torch.manual_seed(0)
    model = WithLoss(MIXING[name], returns)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model)
    output = wrapped(torch.randn(shape))
    loss = output["loss"].sum() if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    with pytest.raises(UnsupportedModuleError, match="gradient in it changes with another sample"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("returns", ["both", "in a dict"])
def test_who_leaves_that_loss_alone_may_use_the_rest(returns):
    torch.manual_seed(0)
    model, x = WithLoss(MIXING["a norm of all"], returns), torch.randn(D, D)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    output = wrapped(x)
    (output[1] if returns == "both" else output["logits"]).square().sum().backward()
    norms = wrapped.get_norm_sample()
    wrapped.to_standard_module()
    exact = loop_over_samples(model, lambda m, x: (m(x)[1] if returns == "both" else m(x)["logits"]).square().sum(), x)
    assert relative_error(norms, norms_of(exact)) <= 1e-5


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("shape", [(1, D), (2, D), (D, D), (D, D, D)], ids=str)
@pytest.mark.parametrize("name", FINE)
def test_a_mean_over_samples_is_right(name, shape, around):
    torch.manual_seed(0)
    model, x = WithLoss(FINE[name], around=AROUND[around]), torch.randn(shape)
    exact = loop_over_samples(model, lambda m, x: m(x), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model)
    wrapped(x).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_a_mean_over_what_is_not_padding_is_refused():
    """A sample's gradient shrinks with how many tokens the others have."""
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, D), nn.Linear(D, 5)

        def forward(self, x, labels):
            return F.cross_entropy(self.head(self.table(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)

    labels = torch.randint(0, 5, (3, 6))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Tagger())
    wrapped(torch.randint(0, 9, (3, 6)), labels).backward()  # equally many
    assert wrapped.get_norm_sample().isfinite().all()
    labels[1, 2:] = -100
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Tagger())
    with pytest.raises(UnsupportedModuleError, match="gradient in it changes with another sample"):
        wrapped(torch.randint(0, 9, (3, 6)), labels).backward()


@pytest.mark.parametrize("shape", [(2, D), (D, D), (D, D, D), (5, 3, D)], ids=str)
def test_what_mixes_behind_a_reentrant_checkpoint_is_refused(shape):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            h = self.first(x)
            h = checkpoint(lambda h: self.second(normalised(h)), h, use_reentrant=True)
            return self.third(h)

    def normalised(h):
        h = torch.tanh(h)
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm())
        return h

    model = Net()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"^first \(Linear\): .* meet in the backward pass"):
        wrapped(torch.randn(shape)).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_look_that_tries_sizes_logs_nothing():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(D, D)

        def forward(self, x, y):
            return self.lin(x) + y[:3]  # which does not fit where the batch is another

    wrapped = dpfast.GradSampleModuleFastGradientClipping(Sum())
    wrapped(torch.randn(3, D), torch.randn(5, D)).square().mean().backward()
    assert wrapped.get_norm_sample().isfinite().all()
    log.removeHandler(handler)
    assert records == []


RAN = Noted()


class Counted(WithLoss):
    """Notes its forward passes; in one of them it mixes samples in another output too."""

    def __init__(self, loss, mixes_from=None):
        super().__init__(loss, "both")
        self.mixes_from, self.passes = mixes_from, [0]  # a list: a number that is set would be another kind of input

    def forward(self, x):
        RAN.note(1)
        loss, h = super().forward(x)
        return loss, h - h.mean(0) if self.passes[0] == self.mixes_from else h


def forwards(wrapped):
    model = wrapped._module
    RAN.clear()
    output = wrapped(torch.randn(5, 3, D))
    model.passes[0] += 1
    return len(RAN.all()), output


def test_what_is_refused_is_not_asked_about_again():
    """What is wrong is run again in several ways: a loss of labels, which nobody uses, took as many in each look."""
    mixing, fine = (
        dpfast.GradSampleModuleFastGradientClipping(Counted(loss)) for loss in (MIXING["less the mean"], FINE["mean"])
    )
    (first, _), (first_fine, _) = forwards(mixing), forwards(fine)
    (second, (loss, _)), (second_fine, _) = forwards(mixing), forwards(fine)
    assert first > first_fine and second == second_fine > 1
    with pytest.raises(UnsupportedModuleError, match="changes with another sample"):
        loss.backward()


def test_another_output_that_mixes_later_is_seen_beside_it():
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Counted(MIXING["less the mean"], mixes_from=1))
    _, (_, h) = forwards(wrapped)
    h.square().mean().backward()
    wrapped.zero_grad()
    with pytest.raises(UnsupportedModuleError):
        _, (_, h) = forwards(wrapped)
        h.square().mean().backward()
