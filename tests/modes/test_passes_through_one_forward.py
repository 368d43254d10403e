"""Two backward passes through one forward: each would clip by itself, and a sample add up to 2C."""

import pytest
import torch
from cases import example
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.opacus import DPOptimizerFast


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


MODES = {
    "one pass": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, loss_reduction="sum"),
    "grad_sample": lambda m: dpfast.GradSampleModule(m, loss_reduction="sum"),
}


@pytest.mark.parametrize("mode", MODES)
def test_two_losses_of_one_forward_are_added_up_first(mode):
    """Each backward pass would clip by itself, and a sample add up to 2C."""
    model, x, _ = example("mlp", 4)
    wrapped = MODES[mode](model)
    output = wrapped(x)
    output.square().sum().backward(retain_graph=True)
    left = {name: g.clone() for name, g in grads(model).items()}
    with pytest.raises(StateError, match=r"\(a \+ b\).backward\(\)"):
        output.abs().sum().backward(retain_graph=True)
    assert all(torch.equal(g, left[name]) for name, g in grads(model).items())
    wrapped.zero_grad()
    output.abs().sum().backward(retain_graph=True)  # what the first has left is gone
    wrapped.zero_grad()
    (output.square().sum() + output.abs().sum()).backward()
    wrapped(x).square().sum().backward()  # another forward pass, of another batch for all that can be told


def test_outputs_of_one_forward_take_one_backward():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            hidden = self.first(x).tanh()
            return hidden, self.second(hidden)

    wrapped = MODES["one pass"](Two())
    hidden, output = wrapped(torch.randn(5, 3))
    hidden.square().sum().backward(retain_graph=True)
    with pytest.raises(StateError, match="count twice"):
        output.square().sum().backward()
    wrapped.zero_grad()
    hidden, output = wrapped(torch.randn(5, 3))
    (hidden.square().sum() + output.square().sum()).backward()


def test_two_passes_go_through_one_forward_once():
    model, x, y = example("mlp", 4)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", passes=2)
    losses = nn.functional.cross_entropy(wrapped(x), y, reduction="none")
    for _ in range(2):  # a first pass leaves nothing
        losses.sum().backward(retain_graph=True)
    wrapped.disable_hooks()
    (wrapped.get_clipping_coef() * losses).sum().backward(retain_graph=True)
    left = {name: g.clone() for name, g in grads(model).items()}
    with pytest.raises(StateError, match="count twice"):
        (wrapped.get_clipping_coef() * losses).sum().backward(retain_graph=True)
    assert all(torch.equal(g, left[name]) for name, g in grads(model).items())
    wrapped.enable_hooks()
    losses.sum().backward(retain_graph=True)  # nothing is left by it
    wrapped.disable_hooks()
    with pytest.raises(StateError, match="count twice"):
        (wrapped.get_clipping_coef() * losses).sum().backward()


class Hidden(nn.Module):
    """Keeps what its first layer gives, as a hook for an auxiliary loss would."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.hidden = []

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.hidden[:] = [hidden]
        return self.second(hidden)


@pytest.mark.parametrize("order", [("output", "hidden"), ("hidden", "output"), ("hidden", "hidden")])
@pytest.mark.parametrize("waits", [False, True])
def test_losses_on_the_way_count_too(order, waits):
    """Also where the first sum has been taken for a virtual step, and is a part of the step all the same."""
    model = Hidden()
    wrapped = MODES["one pass"](model)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    found = {"output": wrapped(torch.randn(5, 3)), "hidden": model.hidden[0]}
    first, second = (found[name].square().sum() for name in order)
    first.backward(retain_graph=True)
    if waits:
        optimizer.signal_skip_step(True)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(StateError, match="count twice"):
        second.backward()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_inputs_go_through_a_clipped_forward(mode):
    """Maps of what counts in an input, attacks on it, a generator's gradient: nothing is clipped by them."""
    model, x, _ = example("mlp", 4)
    wrapped, x = MODES[mode](model), x.requires_grad_()
    output = wrapped(x)
    output.square().sum().backward(retain_graph=True, inputs=list(model.parameters()))
    left = {name: g.clone() for name, g in grads(model).items()}
    (found,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    output.sum().backward(inputs=[x])
    assert torch.equal(found, x.grad) and found.any()
    assert all(torch.equal(g, left[name]) for name, g in grads(model).items())


def test_heads_with_optimizers_of_their_own():
    """One forward, a step for each head: what the first one has taken and cleared is no reason to refuse the other."""
    trunk, heads = nn.Linear(3, 4).requires_grad_(False), nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = trunk, heads

        def forward(self, x):
            return tuple(head(self.trunk(x)) for head in self.heads)

    wrapped = MODES["one pass"](Both())
    outputs = wrapped(torch.randn(5, 3))
    for head, output in zip(heads, outputs, strict=True):
        sgd = torch.optim.SGD(head.parameters(), lr=1.0)
        optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
        output.square().sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
