"""A model that has changed since its step was captured, and what losses are told of it."""

import pytest
import torch
from small_steps import Mlp, check, mlp_batch, square_losses
from torch import nn

import dpfast
from dpfast.errors import StateError


def compiled(net, losses=square_losses):
    return dpfast.compile_step(net, losses, max_grad_norm=0.5, batch_size=5, backend="eager")


@pytest.mark.parametrize("what", ["parameters", "modules"])
def test_a_model_changed_after_capture(what):
    net = Mlp()
    step = compiled(net)
    step(*mlp_batch(5))
    if what == "parameters":
        net.layers[0].weight = nn.Parameter(torch.zeros(8, 6))
    else:
        net.layers[1] = nn.Tanh()
    with pytest.raises(StateError, match=rf"other {what} than when its step was captured.*compile_step"):
        step(*mlp_batch(5))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers(x)


def test_weights_that_are_tied_otherwise_since_the_capture():
    """Each module and each parameter is there as before; the graph would go on with the former function."""
    net, x = Tied(), torch.randn(5, 3)
    step = compiled(net, lambda model, x: model(x).square().sum(1))
    for _ in range(2):
        net.zero_grad()
        step(x)
    net.layers[2].weight = net.layers[1].weight
    with pytest.raises(StateError, match=r"other ties .*than when its step was captured.*compile_step"):
        step(x)


@pytest.mark.parametrize("first", [False, True])
def test_losses_may_ask_whether_the_model_is_in_training(first):
    def losses(model, x, y):
        return square_losses(model, x, y) * (3.0 if model.training else 1.0)

    net = Mlp()
    step = compiled(net, losses)
    for training in (first, not first):
        net.train(training).zero_grad()
        check(step, net, losses, mlp_batch(5))
