"""Per-sample gradients of several backward passes that do not use the same parameters: rows of other samples."""

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from dpfast import ConstantFlatClipper, GradSampleModule, PerSampleGradientClipper
from dpfast.errors import StateError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C = 0.1


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(8, 2, bias=False)

    def forward(self, x, heads):
        return sum(getattr(self, head)(x).square().sum() for head in heads)


def clipper_of(model):
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(C), loss_reduction="sum")
    return model, clipper.clip_and_accumulate, clipper.pre_step


def optimizer_of(model):
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    return GradSampleModule(model, loss_reduction="sum"), optimizer.clip_and_accumulate, optimizer.add_noise


WAYS = [clipper_of, optimizer_of]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tasks", [("a", "b"), ("a", "ab"), ("ab", "b"), ("a", "ab", "b")])
def test_passes_of_other_parameters_are_refused(way, tasks):
    """One sample added 1.414 C after "a", "ab", "b"; unequal numbers of passes were a RuntimeError."""
    model, *_ = way(Heads())
    with pytest.raises(StateError, match="do not use the same parameters"):
        for heads in tasks:
            model(torch.randn(1, 8), heads).backward()


@pytest.mark.parametrize("way", WAYS)
def test_passes_of_the_same_parameters_are_one_batch(way):
    """Also after one that was refused, of which nothing is kept, and after others that were cleared."""
    torch.manual_seed(0)
    x, net = torch.randn(3, 8), Heads()
    expected = clipped_sum(loop_over_samples(net, lambda m, x: m(x, "ab"), x), C)
    model, clip, step = way(net)
    model(x, "a").backward()
    for p in net.parameters():
        p.grad_sample = None
    model(x[:2], "ab").backward()
    with pytest.raises(StateError, match="do not use the same parameters"):
        model(x, "b").backward()
    model(x[2:], "ab").backward()
    clip()
    step()
    for name, p in net.named_parameters():
        assert relative_error(p.grad, expected[name]) < 1e-5, name


def test_heads_that_are_frozen_in_turns():
    """The first head's gradients, of another sample, stood beside the second's."""
    net = Heads()
    model, clip, _ = clipper_of(net)
    for used, other in ((net.a, net.b), (net.b, net.a)):
        used.requires_grad_(True)
        other.requires_grad_(False)
        model(torch.randn(1, 8), "ab").backward()
    net.a.requires_grad_(True)
    with pytest.raises(StateError, match=r"no per-sample gradients for a\.weight"):
        clip()
