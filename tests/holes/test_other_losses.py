"""A second backward pass whose loss reaches what the first did not, whose norms were taken."""

import pytest
import torch
from released import gradients, in_two_passes, nothing_released
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import StateError
from dpfast.modes.second_pass import SecondPass

C = 0.1


class TwoHeads(nn.Module):
    """The second is a probe on detached features."""

    def __init__(self, kept=False):
        super().__init__()
        self.kept = [] if kept else None
        self.l, self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        features = torch.tanh(self.l(x))
        a, b = self.a(features), self.b(features.detach())
        if self.kept is None:
            return a, b
        self.kept.append(b)
        return a


def example(kept=False):
    torch.manual_seed(2)
    model = GradSampleModuleFastGradientClipping(TwoHeads(kept), max_grad_norm=C, loss_reduction="sum", passes=2)
    outputs = model(torch.randn(3, 8))
    a, b = (outputs, model._module.kept[0]) if kept else outputs
    return model, {"a": 1e-3 * a.square().sum(1), "b": 1e3 * b.square().sum(1)}


def sum_of(losses, heads):
    return sum(losses[head] for head in heads)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("first", "second"), [("a", "ab"), ("a", "b"), ("b", "ab"), ("b", "a"), ("ab", "a")])
def test_another_loss_in_the_second_pass_is_refused(first, second, kept):
    """2860 C went into p.grad of a head that the first pass had not reached, without a word; also of one whose output
    the model keeps and does not return."""
    model, losses = example(kept)
    sum_of(losses, first).sum().backward(retain_graph=True)
    factors = model.get_clipping_coef()
    model.disable_hooks()
    with nothing_released(model, "second backward pass"):
        (factors * sum_of(losses, second)).sum().backward()


class OnAnotherDevice(torch.Tensor):
    device = property(lambda self: torch.device("xpu"))

    def to(self, device):
        return self.as_subclass(torch.Tensor)


@pytest.mark.on_cpu
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("first", "second"), [("b", "ab"), ("ab", "a"), ("ab", "b")])
def test_what_another_device_has_found_is_not_waited_for(first, second, kept, monkeypatch):
    faults = SecondPass.faults

    def on_another_device(self):
        messages, at_fault = faults(self)
        return messages, at_fault.as_subclass(OnAnotherDevice)

    monkeypatch.setattr(SecondPass, "faults", on_another_device)
    model, losses = example(kept)
    sum_of(losses, first).sum().backward(retain_graph=True)
    factors = model.get_clipping_coef()
    model.disable_hooks()
    with nothing_released(model, "second backward pass", waited_for=False):
        (factors * sum_of(losses, second)).sum().backward()


def test_another_loss_beside_the_second_pass_is_refused():
    """As one backward pass more."""
    model, losses = example()
    losses["a"].sum().backward(retain_graph=True)
    factors = model.get_clipping_coef()
    model.disable_hooks()
    (factors * losses["a"]).sum().backward(retain_graph=True)
    before = [g.clone() for g in gradients(model)]
    with pytest.raises(StateError, match="and the first, whose norms were taken, did not"):
        losses["b"].sum().backward()
    assert all(map(torch.equal, before, gradients(model)))


def test_ordinary_gradients_after_two_passes():
    """Of forwards with taps and without, before and after the next first pass."""
    model, losses = example()
    in_two_passes(model, sum_of(losses, "ab"), "sum")
    for tapped in (True, False):
        model.zero_grad()
        outputs = [model(torch.ones(2, 8))[1]] if tapped else []
        model.disable_hooks()
        (outputs[0] if tapped else model(torch.ones(2, 8))[1]).sum().backward()
        model.enable_hooks()
        assert torch.equal(model.b.bias.grad, torch.full((2,), 2.0))
    model(torch.ones(2, 8))[0].sum().backward(retain_graph=True)
    outputs = model(torch.ones(2, 8))
    model.zero_grad()
    model.disable_hooks()
    outputs[1].sum().backward()
    assert torch.equal(model.b.bias.grad, torch.full((2,), 2.0))
