"""Two wrapped models whose layers share a parameter: each clips by itself."""

import pytest
import torch
from released import gradients, norm_over
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import StateError
from dpfast.modes import held_by

C = 0.1


def pair(passes):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    nets[1][0].weight = nets[0][0].weight
    return [
        GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum", passes=passes) for net in nets
    ]


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_backward_pass_through_both_is_refused(passes, remembered):
    """A sample moved the shared weight by up to 2 C, without a word; also where a step is like the last one."""
    models, x = pair(passes), torch.randn(1, 8)
    for model in models if remembered else []:
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
    losses = [100 * model(x).sum(1) for model in models]
    if passes == 2:
        for n, model in enumerate(models):
            losses[n].sum().backward(retain_graph=True)
            losses[n] = losses[n] * model.get_clipping_coef()
            model.disable_hooks()
    with pytest.raises(StateError, match="two wrapped models that share a parameter"):
        sum(losses).sum().backward()
    assert norm_over(gradients(models[0]) + gradients(models[1])[1:], C) <= 1.0 + 1e-6


def test_a_backward_pass_for_each_adds_up():
    """As micro-batches do, and the gradient says that it holds two."""
    models = pair(1)
    for model in models:
        model(torch.randn(1, 8)).sum().backward()
    left = [held_by(model.parameters()) for model in models]
    assert [note.passes for note in left] == [2, 2]
