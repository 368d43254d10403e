"""A network that gives what a loss takes in many ways, and losses of that."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C, N, D, K = 0.1, 6, 5, 4
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


def assert_as_the_loop(module, plain, loss, x):
    """One step of ``loss(model, x)``, from which the clipped sum is that of a loop over samples."""
    exact = clipped_sum(loop_over_samples(plain, loss, x), C)
    module.zero_grad()
    loss(module, x).backward()
    for name, total in exact.items():
        assert relative_error(module._module.get_parameter(name).grad, total) < 1e-4


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
