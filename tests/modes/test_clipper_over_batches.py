"""PerSampleGradientClipper where clippers, or what is trainable, change between the batches of a step."""

import pytest
import torch
from cases import example, mean_loss
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.modes.clippers import ConstantFlatClipper, ConstantPerLayerClipper
from dpfast.testing import clipped_sum, loop_over_samples, relative_error


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


class Boxes(nn.Module):
    """A class for each image, and boxes for some."""

    def __init__(self):
        super().__init__()
        self.body, self.label, self.box = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.label(h), self.box(h)


def box_loss(model, x, y, count):
    """Summed over images; of those without a box nothing reaches that head."""
    labels, boxes = model(x)
    total = nn.functional.cross_entropy(labels, y, reduction="sum")
    for i in range(len(x)):
        if count[i]:
            total = total + boxes[i].square().sum()
    return total


@pytest.mark.parametrize("counts", [[0], [2], [0, 0, 0], [0, 1, 0], [1, 2, 1, 1]])
@pytest.mark.parametrize("make", [lambda: ConstantFlatClipper(0.7), lambda: ConstantPerLayerClipper(0.3)])
def test_a_head_that_no_sample_of_a_batch_reaches_has_zeros(counts, make):
    """It was an error, in a batch of one image without a box among others."""
    torch.manual_seed(0)
    model, count = Boxes(), torch.tensor(counts)
    x, y = torch.randn(len(counts), 6), torch.randint(0, 3, (len(counts),))
    exact = loop_over_samples(model, box_loss, x, y, count)
    if make().is_per_layer:
        expected = {name: clipped_sum({name: g}, 0.3)[name] for name, g in exact.items()}
    else:
        expected = clipped_sum(exact, 0.7)
    clipper, told = dpfast.PerSampleGradientClipper(model, make(), loss_reduction="sum"), []
    clipper.set_on_batch_clip_func(lambda **what: told.append(what))
    box_loss(model, x, y, count).backward()
    clipper.clip_and_accumulate()
    assert all(x["per_sample_grad"].shape == exact[x["param_name"]].shape for x in told[:-1])
    thresholds, samples = clipper.pre_step()
    assert samples == len(counts) and len(thresholds) == 6
    for name, p in model.named_parameters():
        assert relative_error(p.grad, expected[name]) <= 1e-5, name


def test_batches_of_a_step_may_reach_other_heads():
    torch.manual_seed(0)
    model, count = Boxes(), torch.tensor([0, 1, 2, 0])
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    expected = clipped_sum(loop_over_samples(model, box_loss, x, y, count), 0.7)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.7), loss_reduction="sum")
    for part in (slice(0, 1), slice(1, 3), slice(3, 4)):
        box_loss(model, x[part], y[part], count[part]).backward()
        clipper.clip_and_accumulate()
    assert clipper.pre_step()[1] == 4
    for name, p in model.named_parameters():
        assert relative_error(p.grad, expected[name]) <= 1e-5, name


def test_what_was_frozen_or_taken_away_is_no_zero():
    """Nor where no backward pass has run since the last clipping, though one before has not reached that head."""
    torch.manual_seed(0)
    model, x, y = Boxes(), torch.randn(2, 6), torch.randint(0, 3, (2,))
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.7), loss_reduction="sum")
    model.label.requires_grad_(False)
    box_loss(model, x, y, torch.tensor([0, 1])).backward()
    model.label.requires_grad_(True)
    with pytest.raises(StateError, match=r"for label\.weight, label\.bias: call loss\.backward"):
        clipper.clip_and_accumulate()
    clipper.zero_grad()
    box_loss(model, x, y, torch.tensor([0, 1])).backward()
    model.box.weight.grad_sample = None
    with pytest.raises(StateError, match=r"for box\.weight: call loss\.backward"):
        clipper.clip_and_accumulate()
    clipper.zero_grad()
    box_loss(model, x, y, torch.tensor([0, 0])).backward()
    clipper.clip_and_accumulate()
    with pytest.raises(StateError, match=r"body\.weight.*box\.bias: call loss\.backward"):
        clipper.clip_and_accumulate()


def test_a_step_before_the_average_takes_nothing_that_is_not_clipped():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(6, 3), torch.randn(4, 6)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.7))
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), model.weight.detach().clone()
    model(x).square().sum(1).mean().backward()
    clipper.clip_and_accumulate()
    optimizer.step()
    assert torch.equal(model.weight, before)
    clipper.pre_step()
    optimizer.step()
    assert 0.0 < float((model.weight - before).detach().norm()) <= 0.7
    assert repr(clipper).endswith(", ConstantFlatClipper(sensitivity=0.7))")


@pytest.mark.parametrize("how", ["assigned", "another"])
def test_sums_of_parameters_that_were_replaced_are_not_lost_in_silence(how):
    model = nn.Linear(4, 3)
    clipper = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    model(torch.randn(6, 4)).square().mean().backward()
    clipper.clip_and_accumulate()
    if how == "assigned":
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    else:
        model.weight = nn.Parameter(torch.randn(3, 4))
    model(torch.randn(6, 4)).square().mean().backward()
    clipper.clip_and_accumulate()
    with pytest.raises(StateError, match="were replaced"):
        clipper.pre_step()
    clipper.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()


def test_a_batch_that_failed_is_taken_once():
    """Out of memory at the last parameter, and once more: what had been summed until then had the batch twice."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), 50.0 * torch.randn(5, 4)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    clipper, failed = dpfast.PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum"), []

    def fails_once(param_name, **_):
        if param_name == "2.bias" and not failed:
            failed.append(param_name)
            raise torch.OutOfMemoryError("no memory for a log")

    clipper.set_on_batch_clip_func(fails_once)
    for times in (1, 2):
        model(x).square().sum().backward()
        if times == 1:
            with pytest.raises(torch.OutOfMemoryError):
                clipper.clip_and_accumulate()
        clipper.clip_and_accumulate()
    _, n = clipper.pre_step()
    expected = clipped_sum(exact, 1.0)
    assert n == 2 * len(x)
    assert all(relative_error(p.grad, 2 * expected[name]) <= 1e-4 for name, p in model.named_parameters())
