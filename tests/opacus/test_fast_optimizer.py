"""DPOptimizerFast against Opacus's own optimizer, and the noise it adds."""

import copy
import functools
import pickle

import opacus
import pytest
import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus_cases import clipped_by_hand
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.opacus import ClippedLoss, DPOptimizerFast, OnePassOptimizer, TwoPassOptimizer, noise


def model_with_gradients(dtype=torch.float32, width=5):
    model = nn.Linear(width, 7).to(dtype)
    clipped_by_hand(model.parameters(), [torch.randn(p.shape).to(dtype) for p in model.parameters()], 2.0)
    return model


def optimizer_of(cls, model, sigma=0.0, seed=0, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    options = {"max_grad_norm": 2.0, "expected_batch_size": 8, "generator": generator, **options}
    return cls(sgd, noise_multiplier=sigma, **options)


LOW = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(opacus.__version__ < "1.6", reason="Opacus 1.5.4 fails"))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sigma", [0.0, 1.5])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, LOW])
def test_same_steps_as_opacus_to_the_bit(reduction, sigma, secure, dtype):
    theirs = model_with_gradients(dtype)
    ours = copy.deepcopy(theirs)
    clipped_by_hand(ours.parameters(), [p.grad.clone() for p in theirs.parameters()], 2.0)
    options = {"loss_reduction": reduction, "secure_mode": secure}
    optimizer_of(DPOptimizerFastGradientClipping, theirs, sigma, **options).step()
    optimizer_of(DPOptimizerFast, ours, sigma, **options).step()
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", ["conv", "tied", "scalar"])
def test_same_steps_whatever_the_layout(name):
    """Channels-last and transposed gradients, a parameter of no dimensions: Opacus fills its noise row by row."""
    models = []
    for cls in (DPOptimizerFastGradientClipping, DPOptimizerFast):
        torch.manual_seed(0)
        if name == "conv":
            model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        elif name == "tied":
            model = nn.Linear(4, 3)
            model.weight = nn.Parameter(model.weight.detach().t())
        else:
            model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0))})
        clipped_by_hand(model.parameters(), [torch.randn_like(p) for p in model.parameters()], 2.0)
        optimizer_of(cls, model, sigma=1.0).step()
        models.append(model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad) and p.grad.stride() == q.grad.stride()


@pytest.mark.parametrize("secure", [False, True])
def test_mean_and_variance_of_the_noise(secure):
    model = nn.Linear(500, 400)
    clipped_by_hand(model.parameters(), [torch.full_like(p, 3.0) for p in model.parameters()], 2.0)
    optimizer_of(DPOptimizerFast, model, sigma=1.5, loss_reduction="sum", secure_mode=secure).pre_step()
    noise = model.weight.grad - 3.0
    n, std = noise.numel(), 1.5 * 2.0
    assert abs(noise.mean()) < 5 * std / n**0.5
    assert abs(noise.var() / std**2 - 1) < 5 * (2 / n) ** 0.5


def test_the_generator_decides_the_noise():
    model = model_with_gradients()
    runs = []
    for seed in (1, 1, 2):
        own = copy.deepcopy(model)
        clipped_by_hand(own.parameters(), [p.grad.clone() for p in model.parameters()], 2.0)
        optimizer_of(DPOptimizerFast, own, sigma=1.0, seed=seed).pre_step()
        runs.append(own.weight.grad)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_skipped_steps_add_up_without_noise():
    model = model_with_gradients()
    first = model.weight.grad.clone()
    optimizer = optimizer_of(DPOptimizerFast, model, sigma=0.0, loss_reduction="sum")
    optimizer.signal_skip_step(True)
    optimizer.step()
    optimizer.zero_grad()
    clipped_by_hand(model.parameters(), [torch.ones_like(p) for p in model.parameters()], 2.0)
    optimizer.signal_skip_step(False)
    optimizer.pre_step()
    assert torch.equal(model.weight.grad, first + 1.0)


def test_passes_are_counted():
    """Two backward passes of a one-pass module before a step: the accountant and the average count two."""
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    private = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=2.0)
    optimizer = optimizer_of(DPOptimizerFast, model)
    counted = []
    optimizer.attach_step_hook(lambda o: counted.append(o.accumulated_iterations))
    for passes in (1, 2, 3):
        optimizer.zero_grad()
        for _ in range(passes):
            private(x).square().sum(1).mean().backward()
        summed = model.weight.grad.clone()
        optimizer.pre_step()
        assert torch.equal(model.weight.grad, summed / (8 * passes))
    assert counted == [1, 2, 3]
    assert optimizer.accumulated_iterations == 1


def test_a_parameter_that_was_frozen_when_gradients_were_cleared():
    """A head is trained first: Opacus clears what is trainable then, and left no place for the others' sums."""
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizer = optimizer_of(DPOptimizerFast, model, sigma=0.0, loss_reduction="sum")
    optimizer.zero_grad()
    model.weight.requires_grad_(True)
    clipped_by_hand(model.parameters(), [torch.full_like(p, 3.0) for p in model.parameters()], 2.0)
    optimizer.pre_step()
    assert all((p.grad == 3.0).all() for p in model.parameters())


def test_a_parameter_without_a_gradient_gets_noise():
    model = model_with_gradients()
    model.bias.grad = None
    optimizer = optimizer_of(DPOptimizerFast, model, sigma=1.0)
    optimizer.pre_step()
    assert (model.bias.grad != 0).all()
    optimizer.zero_grad(set_to_none=True)
    with pytest.raises(StateError, match="no backward pass"):
        optimizer.step()


def test_a_gradient_is_taken_once():
    """A forgotten zero_grad after a skipped step: Opacus's optimizer adds the first gradient twice."""
    model = model_with_gradients()
    first = model.weight.grad.clone()
    optimizer = optimizer_of(DPOptimizerFast, model, loss_reduction="sum")
    for skip in (True, False):
        optimizer.signal_skip_step(skip)
        for p in model.parameters():
            grad = torch.ones_like(p) if not skip else p.grad
            p.grad = grad if p.grad is None or skip else p.grad + grad
        clipped_by_hand(model.parameters(), [p.grad for p in model.parameters()], 2.0)
        optimizer.pre_step()
    assert torch.equal(model.weight.grad, first + 1.0)


def test_no_parameters():
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = optimizer_of(DPOptimizerFast, model)
    assert optimizer.pre_step()


def test_a_sum_is_used_once():
    model = model_with_gradients()
    optimizer = optimizer_of(DPOptimizerFast, model, sigma=1.0)
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()


@pytest.mark.on_cpu
@pytest.mark.parametrize("extra", [-1, 0, 1, 15, 16, 17])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_noise_by_pieces_is_that_of_the_whole(pieces, extra):
    """torch draws sixteen at a time, and the last sixteen once more where they do not come out even."""
    model = nn.ParameterDict({"p": nn.Parameter(torch.zeros(pieces * noise._PIECE + extra))})
    model["p"].grad = torch.zeros_like(model["p"])
    optimizer_of(DPOptimizerFast, model, sigma=0.5, seed=3, loss_reduction="sum").pre_step()
    whole = torch.normal(0.0, 1.0, model["p"].shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(model["p"].grad, whole)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("bound", [False, True])
def test_copies_are_refused_and_break_nothing(copies, bound):
    """torch's ``__setstate__`` failed half-way, having changed ``step`` of the class: no optimizer of it could step."""

    def made():
        torch.manual_seed(0)
        module = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(5, 7), max_grad_norm=2.0)
        cls, options = (OnePassOptimizer, {"module": module}) if bound else (DPOptimizerFast, {})
        return module, optimizer_of(cls, module, sigma=1.0, **options)

    def stepped(module, optimizer):
        module(torch.ones(8, 5)).square().sum(1).mean().backward()
        optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    expected = stepped(*made())
    module, optimizer = made()
    with pytest.raises(StateError, match=r"not copied or pickled.*state_dict\(\)"):
        copies(optimizer)
    for some in ((module, optimizer), made()):
        assert all(map(torch.equal, stepped(*some), expected))
    another = made()[1]
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # what the message says


@pytest.mark.parametrize("bound", [False, True])
def test_the_first_of_two_passes_is_no_step(bound):
    model = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(3, 2), max_grad_norm=2.0, passes=2)
    cls = functools.partial(TwoPassOptimizer, module=model) if bound else DPOptimizerFast
    optimizer, before = optimizer_of(cls, model), model.weight.detach().clone()
    with pytest.raises(StateError, match="no backward pass of the dpfast module since the last step"):
        optimizer.step()
    model(torch.ones(4, 3)).sum(1).mean().backward()
    with pytest.raises(StateError, match=r"the first of two \(passes=2\).*dpfast\.opacus\.ClippedLoss"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    losses = ClippedLoss(model, optimizer, nn.CrossEntropyLoss())(model(torch.ones(4, 3)), torch.zeros(4).long())
    losses.backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
