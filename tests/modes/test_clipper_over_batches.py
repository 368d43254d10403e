"""PerSampleGradientClipper where clippers, or what is trainable, change between the batches of a step."""

import pytest
import torch
from cases import example, mean_loss
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.modes.clippers import ConstantFlatClipper, ConstantPerLayerClipper


def lower_it(model, clipper):
    clipper.norm_clipper.flat_value = 0.1


def replace_it(model, clipper):
    clipper.norm_clipper = ConstantFlatClipper(0.1)


def freeze_a_layer(model, clipper):
    model[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "change", "bound"),
    [
        (lambda: ConstantFlatClipper(5.0), lower_it, 5.0),
        (lambda: ConstantFlatClipper(5.0), replace_it, 5.0),
        (lambda: ConstantPerLayerClipper(1.0), freeze_a_layer, 2.0),
    ],
)
def test_thresholds_are_those_of_all_batches(make, change, bound):
    """Noise was for the last batch's, and a sample of the first moved the sum by five times as much."""
    torch.manual_seed(0)
    first, others, last = (50.0 * torch.randn(n, 4) for n in (1, 2, 2))
    sums = []
    for batch in (torch.cat([others, first]), others):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        clipper = dpfast.PerSampleGradientClipper(model, make(), loss_reduction="sum")
        model(batch).square().sum().backward()
        clipper.clip_and_accumulate()
        change(model, clipper)
        model(last).square().sum().backward()
        clipper.clip_and_accumulate()
        thresholds, _ = clipper.pre_step()
        assert thresholds.tolist() == [bound] * 4
        sums.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        model.zero_grad()
        model(last).square().sum().backward()  # of the next step there are no more than of its own batches
        clipper.clip_and_accumulate()
        assert clipper.pre_step()[0].max() < bound
    assert (sums[0] - sums[1]).norm() > 0.7 * bound


def test_one_clipper_for_two_models():
    shared = ConstantPerLayerClipper(1.0)
    nets = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), nn.Linear(4, 1)]
    clippers = [dpfast.PerSampleGradientClipper(net, shared) for net in nets]
    for net, clipper in zip(nets, clippers, strict=True):
        net(torch.ones(2, 4)).sum().backward()
        clipper.clip_and_accumulate()
    assert clippers[0].pre_step()[0].tolist() == [2.0] * 4
    assert clippers[1].pre_step()[0].tolist() == pytest.approx([2.0**0.5] * 2)


def test_a_parameter_that_is_frozen_before_it_is_clipped_is_not_released():
    """It kept its ordinary gradient, and the optimizer stepped with it."""
    model, x, y = example("mlp", 4)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    mean_loss(model, x, y).backward()
    model[0].weight.requires_grad_(False)
    clipper.clip_and_accumulate()
    with pytest.raises(StateError, match=r"0\.weight .* nobody has clipped"):
        clipper.pre_step()
    model[0].weight.grad = None
    assert clipper.pre_step()[1] == 4
