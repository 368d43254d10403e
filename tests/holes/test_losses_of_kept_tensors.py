"""Losses of tensors that the model's forward pass made, and that are not in what it returns or not to be found there:
kept in an attribute or by a hook, in an object with slots, by a function that is returned."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C, N, D, K, STEPS = 0.1, 6, 5, 4, 3
TARGETS = torch.linspace(-1.0, 1.0, N * 7).view(N, 7)


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: torch.Tensor
    logits: torch.Tensor


class Bare:
    __slots__ = ("__hidden", "logits")

    def __init__(self, hidden, logits):
        self.__hidden, self.logits = hidden, logits

    @property
    def hidden(self):
        return self.__hidden


class Net(nn.Module):
    """What a loss takes comes from two layers, the logits from both."""

    def __init__(self, gives="attribute"):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(D, 7), nn.Linear(7, 7), nn.Linear(7, K)
        self.gives = gives

    def features(self, x):
        return torch.tanh(self.middle(torch.tanh(self.first(x))))

    def forward(self, x):
        if "checkpoint" in self.gives:
            reentrant = self.gives == "reentrant checkpoint"  # which has gradients where its inputs have
            x = x.detach().requires_grad_() if reentrant else x
            hidden = checkpoint(self.features, x, use_reentrant=reentrant)
        else:
            hidden = self.features(x)
        logits = self.last(hidden)
        if self.gives in ("slots", "bare slots"):
            return {"slots": Slots, "bare slots": Bare}[self.gives](hidden, logits)
        if self.gives == "closure":
            return lambda: (hidden, logits)
        if self.gives == "output":
            return hidden, logits
        if self.gives != "hook":
            self.hidden = hidden
        return logits


GIVES = ["attribute", "hook", "slots", "bare slots", "closure", "output", "checkpoint", "reentrant checkpoint"]


def network(gives="attribute"):
    torch.manual_seed(0)
    return Net(gives)


def wrapped(model, mode="one pass"):
    if mode == "grad_sample":
        return dpfast.GradSampleModule(model, loss_reduction="sum")
    return dpfast.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=C, passes=1 + (mode == "two passes")
    )


def given(model, x):
    """What the model keeps, and its logits."""
    inner = getattr(model, "_module", model)
    if inner.gives == "hook":
        seen = []
        handle = inner.middle.register_forward_hook(lambda module, args, output: seen.append(output))
        logits = model(x)
        handle.remove()
        return torch.tanh(seen[-1]), logits
    output = model(x)
    if inner.gives == "closure":
        return output()
    if inner.gives == "output":
        return output
    return (output.hidden, output.logits) if inner.gives.endswith("slots") else (inner.hidden, output)


class Twice(torch.autograd.Function):
    """The product, of which there are second derivatives."""

    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return factor * x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * ctx.factor * y, None, grad * ctx.factor * x


MIX = {
    "spread": lambda h, y: y.square().sum() + 50 * (h - h.mean(0)).square().mean(0).rsqrt().sum(),
    "spread alone": lambda h, y: (h - h.mean(0)).square().mean(0).rsqrt().sum(),
    "of another's output": lambda h, y: (h[:, :K] * y.roll(1, 0)).sum(),
    "added": lambda h, y: (h.sum(1, keepdim=True) + y).std(0).sum(),
    "decorrelated": lambda h, y: y.sum() + (h.t() @ h).square().sum(),
    "a function": lambda h, y: y.sum() + Twice.apply(h, 2.0, h.flip(0)).sum(),
}
APART = {
    "squares": lambda h, y: y.square().sum() + F.mse_loss(h, TARGETS[: len(h)].to(h), reduction="sum"),
    "features alone": lambda h, y: h.square().sum(1).sqrt().sum(),
    "distilled": lambda h, y: F.mse_loss(h[:, :K], y, reduction="sum"),
    "added": lambda h, y: (h.sum(1, keepdim=True) + y).exp().sum(),
    "scores": lambda h, y: (F.normalize(h, dim=1) @ torch.ones(7, 3).to(h)).logsumexp(1).sum() - y.sum(),
    "a function": lambda h, y: y.sum() + Twice.apply(h, 2.0, h.flip(1)).sum(),
    "sorted by itself": lambda h, y: y.max(1).values.sum() + h.sort(1).values.cumsum(1).square().sum(),
    "without features": lambda h, y: y.square().sum(),
}


def ways(losses, *usual):
    """All losses of what is kept in an attribute or given by a function; the usual ones of what comes otherwise."""
    return [(how, gives) for gives in GIVES for how in (losses if gives in ("attribute", "closure") else usual)]


@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
@pytest.mark.parametrize(("how", "gives"), ways(MIX, "spread"))
def test_samples_that_meet(how, gives, mode):
    model = network(gives)
    loss = MIX[how](*given(wrapped(model, mode), torch.randn(N, D)))
    with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
        loss.backward()
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.parameters())


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize(("how", "gives"), ways(APART, "squares", "distilled"))
def test_samples_apart(how, gives):
    """In steps that are looked at, and in others."""
    model = network(gives)
    plain, module = copy.deepcopy(model), wrapped(model)
    for _ in range(STEPS):
        x = torch.randn(N, D)
        module.zero_grad()
        if how == "squares":  # the targets are samples' own
            exact = loop_over_samples(plain, lambda m, x, t: _squares(*given(m, x), t), x, TARGETS)
        else:
            exact = loop_over_samples(plain, lambda m, x: APART[how](*given(m, x)), x)
        APART[how](*given(module, x)).backward()
        for name, total in clipped_sum(exact, C).items():
            own = model.get_parameter(name).grad
            assert relative_error(torch.zeros_like(total) if own is None else own, total) < 1e-4


def _squares(h, y, targets):
    return y.square().sum() + F.mse_loss(h, targets.to(h), reduction="sum")


def test_hard_examples():
    h, y = given(wrapped(network()), torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match="topk ranks the samples"):
        (y.sum() + h.square().sum(1).topk(2).values.sum()).backward()


def test_a_mixing_forward_that_gives_slots():
    class Mixing(Net):
        def forward(self, x):
            y = self.last(self.features(x))
            return Slots(y, (y - y.mean(0)) / y.std(0))

    module = wrapped(Mixing())
    with pytest.raises(UnsupportedModuleError, match="is no sum of samples' own"):
        module(torch.randn(N, D)).logits.pow(3).sum().backward()


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("mixes", [False, True])
def test_two_views(mixes):
    """A part of the loss is made between the forward passes, which is neither's."""
    module, plain = wrapped(network()), network()

    def loss(model, x):
        h, _ = given(model, x)
        part = (h - mixes * h.mean(0)).square().sum(1).sqrt().sum()
        other, y = given(model, x + 0.1)
        return part + (h * other).sum(1).square().sum() + y.square().sum()

    for _ in range(STEPS):
        x = torch.randn(N, D)
        if mixes:
            with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
                loss(module, x).backward()
            return
        module.zero_grad()
        exact = clipped_sum(loop_over_samples(plain, loss, x), C)
        loss(module, x).backward()
        for name, total in exact.items():
            assert relative_error(module._module.get_parameter(name).grad, total) < 1e-4


def test_hooks_and_kept_gradients_see_one_backward_pass():
    h, y = given(wrapped(network()), torch.randn(N, D))
    seen = []
    h.retain_grad()
    h.register_hook(seen.append)
    (y.sum() * 0 + h.square().sum()).backward()
    assert len(seen) == 1
    assert torch.equal(h.grad, 2 * h.detach())


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
def test_a_number_that_is_kept():
    """A loss of the samples' may be added, and no root of it."""

    class Aux(Net):
        def forward(self, x):
            y = super().forward(x)
            self.aux = self.hidden.square().sum()
            return y

    module = wrapped(Aux())
    (module(torch.randn(N, D)).square().sum() + module._module.aux).backward()
    module = wrapped(Aux())
    y = module(torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match=r"\(\), samples meet in the loss"):
        (y.square().sum() + module._module.aux.sqrt()).backward()


def test_samples_in_no_dimension_of_their_own_are_taken_on_trust():
    class Folded(Net):
        def forward(self, x):
            hidden = self.features(x)
            self.rows = hidden.reshape(-1, 7)
            return self.last(hidden)

    module = wrapped(Folded())
    y = module(torch.randn(N, 3, D))
    with pytest.warns(DpfastWarning, match="taken on trust") as said:
        (y.square().sum() + module._module.rows.square().sum()).backward()
    assert said[0].filename == __file__
    assert module.get_norm_sample().shape == (N,)
