"""Samples that meet between the model's outputs and the loss, where no exchanged sample is seen."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import clipped_as_told
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

C, N, D, K = 0.1, 6, 5, 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, K))


def wrapped(model, mode="one pass"):
    if mode == "grad_sample":
        return dpfast.GradSampleModule(model, loss_reduction="sum")
    return dpfast.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=C, passes=1 + (mode == "two passes")
    )


TARGETS = torch.arange(N) % K
REAL = torch.linspace(-1.0, 1.0, N * K).view(N, K)


def ranked(y):
    """With a margin to every other sample, smoothly."""
    scores = y.sum(1)
    return F.softplus(scores[:, None] - scores[None, :]).sum()


MIX = {
    "divided by the batch's spread": lambda y: F.cross_entropy(y / y.std(0), TARGETS),
    "centred": lambda y: F.cross_entropy(y - y.mean(0), TARGETS),
    "batch norm": lambda y: F.cross_entropy(F.batch_norm(y, None, None, training=True), TARGETS),
    "root of the mean": lambda y: F.mse_loss(y, REAL).sqrt(),
    "perplexity": lambda y: F.cross_entropy(y, TARGETS).exp(),
    "logarithm": lambda y: (y - REAL).square().sum().log(),
    "softmax over the batch": lambda y: -y.log_softmax(0).diagonal().sum(),
    "worst, smoothly": lambda y: F.cross_entropy(y, TARGETS, reduction="none").logsumexp(0),
    "weights of the batch": lambda y: (F.softmax((y - REAL).square().sum(1), 0) * (y - REAL).square().sum(1)).sum(),
    "differences": lambda y: (y[:, None] - y[None]).square().sum(2).add(1.0).log().sum(),
    "ranked": ranked,
    "all pairs": lambda y: F.cross_entropy(y @ y.t(), torch.arange(N)),
    "neighbours": lambda y: (y[1:] * y[:-1]).sum(),
    "pairs": lambda y: (y[0::2] * y[1::2]).sum(),
    "halves": lambda y: (y[: N // 2] * y[N // 2 :]).sum(),
    "from the last to the first": lambda y: (y * y.flip(0)).sum(),
    "moments": lambda y: F.mse_loss(y, REAL) + 0.01 * y.var(0).sum(),
    "in double precision": lambda y: F.mse_loss(y.double(), REAL.double()).sqrt(),
    "with a mask": lambda y: y.masked_fill(torch.eye(N, K) > 0, -math.inf).softmax(0)[3:].sum(),
}

APART = {
    "cross entropy": lambda y: F.cross_entropy(y, TARGETS),
    "label smoothing": lambda y: F.cross_entropy(y, TARGETS, label_smoothing=0.1, reduction="sum"),
    "squares": lambda y: F.mse_loss(y, REAL),
    "absolute": lambda y: F.l1_loss(y, REAL),
    "linear": lambda y: (y * REAL).sum(),
    "huber": lambda y: F.huber_loss(y, REAL),
    "binary": lambda y: F.binary_cross_entropy_with_logits(y, REAL.sigmoid()),
    "with infinite ones": lambda y: F.cross_entropy(
        y.masked_fill(torch.eye(N, K)[:, [1, 2, 3, 0]] > 0, -math.inf), TARGETS * 0
    ),
    "each a root": lambda y: (y - REAL).square().sum(1).sqrt().mean(),
    "attention over one's own": lambda y: torch.softmax(y[:, :, None] * y[:, None, :], 2).square().sum(),
    "folded": lambda y: F.cross_entropy(y.reshape(-1, 2), (TARGETS % 2).repeat_interleave(2)),
    "a head": lambda y: F.linear(y, torch.ones(3, K)).tanh().sum(),
    "sorted": lambda y: y.sort(1).values.cumsum(1).square().sum(),
    "scaled": lambda y: 65536.0 * F.cross_entropy(y, TARGETS),
    "in its place": lambda y: F.cross_entropy(y.mul_(2.0), TARGETS),
    "kl": lambda y: F.kl_div(y.log_softmax(1), REAL.softmax(1), reduction="batchmean"),
}


@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
@pytest.mark.parametrize("how", MIX)
def test_samples_that_meet_in_the_loss(how, mode):
    model = network()
    module = wrapped(model, mode)
    loss = MIX[how](module(torch.randn(N, D)))
    with pytest.raises(UnsupportedModuleError, match=r"behind output 0 of the model, \(6, 4\), samples meet|all pairs"):
        loss.backward()
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.parameters())


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("how", APART)
def test_samples_apart(how):
    """And gradients are those without the look."""
    model, x = network(), torch.randn(N, D)
    module = dpfast.GradSampleModule(model, loss_reduction="sum")
    plain = network()
    APART[how](plain(x)).backward()
    for _ in range(9):
        module.zero_grad()
        APART[how](module(x)).backward()
        for own, p in zip(plain.parameters(), model.parameters(), strict=True):
            assert relative_error(p.grad_sample.sum(0), own.grad) < 1e-5


@pytest.mark.parametrize("how", ["root of the mean", "all pairs"])
def test_who_tries_again_is_refused_again(how):
    """By the same graph and by a new one: a cell that is run once more, a loop that goes on after an error."""
    module = wrapped(network())
    for _ in range(3):
        loss = MIX[how](module(torch.randn(N, D)))
        for _ in range(2):
            with pytest.raises(UnsupportedModuleError, match=r"samples meet|all pairs"):
                loss.backward()
        module.zero_grad()
    APART["squares"](module(torch.randn(N, D))).backward()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_of_one_sample_and_of_none(retain_graph):
    """There is nothing to see, so the first batch of several is looked at."""
    module = wrapped(network())
    for n in (1, 0):
        F.mse_loss(module(torch.randn(n, D)), torch.ones(n, K), reduction="sum").add(1.0).sqrt().backward(
            retain_graph=retain_graph
        )
        module.zero_grad()
    with pytest.raises(UnsupportedModuleError, match="samples meet"):
        MIX["root of the mean"](module(torch.randn(N, D))).backward()


def test_samples_of_one_unit_may_meet():
    """Choices of a question, each a sample of the model: a unit's gradient is of all its samples."""
    x, ids, y = torch.randn(N, 2, D), torch.arange(N).repeat_interleave(2), TARGETS % 2

    def loss(model, x, y):
        return F.cross_entropy(model(x.flatten(0, 1))[:, 0].view(-1, 2), y, reduction="sum")

    module = wrapped(network())
    with module.units(ids, N):
        loss(module, x, y).backward()
    exact = loop_over_samples(network(), loss, x, y)
    for name, total in clipped_as_told(module.get_clipping_coef(), exact, C).items():
        assert relative_error(module._module.get_parameter(name).grad, total, least=C) < 1e-5
    module.zero_grad()
    with pytest.raises(UnsupportedModuleError, match="samples meet"):
        loss(module, x, y).backward()  # none of units(...)


@pytest.mark.parametrize("ids", [[0, 1, 1, 2, 2, 0], [0, 0, 1, 1, 2, -1]])
def test_units_that_meet(ids):
    module = wrapped(network())
    with module.units(torch.tensor(ids), 3), pytest.raises(UnsupportedModuleError, match="samples meet"):
        MIX["pairs"](module(torch.randn(N, D))).backward()


class Outputs(nn.Module):
    """Several, of which one is made from another; time first; a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, 7), nn.Linear(7, K)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        return {
            "hidden": hidden,
            "logits": logits,
            "time first": logits.transpose(0, 1),
            "loss": logits.square().mean(),
        }


def several(take, t=3, seed=0):
    torch.manual_seed(seed)
    module = wrapped(Outputs())
    return module, take(module(torch.randn(N, t, D)))


@pytest.mark.parametrize("t", [3, N])
@pytest.mark.parametrize(
    "take",
    [
        lambda out: out["time first"].softmax(1).square().sum(),
        lambda out: out["loss"].sqrt(),
        lambda out: out["logits"].std(0).sum() + out["hidden"].sum(),
    ],
    ids=["time first", "a root of the model's loss", "of one of two"],
)
def test_of_several_outputs(take, t):
    module, loss = several(take, t)
    with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
        loss.backward()
    assert module._module.last.weight.grad is None


@pytest.mark.parametrize("t", [3, N])
@pytest.mark.parametrize(
    "take",
    [
        lambda out: out["hidden"].square().sum() + out["logits"].square().sum(),
        lambda out: out["time first"].softmax(0).square().sum(),
        lambda out: out["logits"].softmax(1).square().sum(),
        lambda out: out["loss"],
        lambda out: 3.0 * out["loss"] + out["hidden"].tanh().sum(),
    ],
)
def test_several_outputs_apart(take, t):
    """Over positions they may meet, also where there are as many as samples."""
    module, loss = several(take, t)
    loss.backward()
    assert module.get_norm_sample().shape == (N,)


def test_a_loss_that_has_no_second_derivatives_is_taken_on_trust():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum().sqrt()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x / x.square().sum().sqrt()

    module = wrapped(network())
    with pytest.warns(DpfastWarning, match="taken on trust"):
        Own.apply(module(torch.randn(N, D))).backward()
    module.zero_grad()
    compiled = torch.compile(lambda y: F.mse_loss(y, REAL).sqrt(), backend="aot_eager")
    with pytest.warns(DpfastWarning, match="differentiable once"):
        compiled(wrapped(network())(torch.randn(N, D))).backward()
    module = wrapped(network())
    y, lengths = module(torch.randn(N, D)).log_softmax(1), torch.full((N,), 3)
    with pytest.warns(DpfastWarning, match=r"ctc_loss.*not implemented"):
        F.ctc_loss(y.expand(3, N, K), TARGETS[:, None] % 3 + 1, lengths, lengths // 3).backward()
    assert module.get_norm_sample().isfinite().all()


def test_of_several_losses_and_of_given_gradients():
    for mixes in (False, True):
        module = wrapped(network())
        y = module(torch.randn(N, D))
        losses = [y.square().sum(1), y.tanh().sum() + mixes * y.std(0).sum()]
        with pytest.raises(UnsupportedModuleError, match="samples meet") if mixes else nullcontext():
            torch.autograd.backward(losses, [torch.ones(N), None])


def test_hooks_and_kept_gradients_see_one_backward_pass():
    module = wrapped(network())
    y = module(torch.randn(N, D))
    y.retain_grad()
    y.square().sum().backward()
    assert torch.equal(y.grad, 2 * y.detach())


def test_a_weight_that_was_zero_shows_at_a_later_look():
    """At the 8th step at the latest."""
    module = wrapped(network())
    for i in range(7):
        y = module(torch.randn(N, D))
        (y.square().sum() + (0.1 * y.var(0).sum() if i > 1 else 0.0)).backward()
        module.zero_grad()
    y = module(torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match="samples meet"):
        (y.square().sum() + 0.1 * y.var(0).sum()).backward()


def test_two_views_are_one_batch():
    x = torch.randn(N, D)
    module = wrapped(network())
    one, two = module(x), module(x + 0.1)
    (one * two).sum(1).square().sum().backward()
    exact = loop_over_samples(network(), lambda m, x: (m(x) * m(x + 0.1)).sum(1).square().sum(), x)
    for name, total in clipped_as_told(module.get_clipping_coef(), exact, C).items():
        assert relative_error(module._module.get_parameter(name).grad, total) < 1e-5
    module = wrapped(network())
    one, two = module(x), module(x + 0.1)
    with pytest.raises(UnsupportedModuleError, match="samples meet"):
        (one * two.roll(1, 0)).sum(1).square().sum().backward()
