"""What is about to be released without noise, or counted twice, is refused in front of the step."""

from functools import partial

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfast
from dpfast.errors import InputError, StateError
from dpfast.opacus import DPOptimizerFast, PrivacyEngine

MODES = ["dpfast", "dpfast_two_pass", "dpfast_materialize"]
C, N, D = 1.0, 8, 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3))


def batch():
    return torch.randn(N, D), torch.randint(0, 3, (N,))


def private(model, mode, cls=PrivacyEngine, sigma=1.0, kind=torch.optim.SGD, **options):
    data = DataLoader(TensorDataset(*batch()), batch_size=N)
    optimizer = kind(model.parameters(), lr=0.5)
    options = {"noise_multiplier": sigma, "max_grad_norm": C, "poisson_sampling": False, **options}
    module, optimizer, *criterion, _ = cls().make_private(
        module=model, optimizer=optimizer, data_loader=data, grad_sample_mode=mode, **options
    )
    return module, optimizer, criterion[0] if criterion else nn.CrossEntropyLoss()


def clipping(model):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    options = {"noise_multiplier": 1.0, "max_grad_norm": C, "expected_batch_size": N}
    return wrapped, DPOptimizerFast(torch.optim.SGD(model.parameters(), lr=0.5), **options)


def values(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("part", [slice(0, 1), slice(0, 3)], ids=["a layer", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_what_was_frozen_since_the_backward_pass(mode, part):
    """Noise is for what is trainable, and the wrapped optimizer stepped on all: the first sum without any."""
    model = net()
    module, optimizer, criterion = private(model, mode)
    x, y = batch()
    criterion(module(x), y).backward()
    model[part].requires_grad_(False)
    before = values(model)
    with pytest.raises(StateError, match=r"\(5, 4\) is frozen and has a gradient.*without noise"):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))


@pytest.mark.parametrize("how", ["trainable again", "no gradient", "a step first"])
def test_what_the_error_says_helps(how):
    model = net()
    wrapped, optimizer = clipping(model)
    F.cross_entropy(wrapped(batch()[0]), batch()[1]).backward()
    if how == "a step first":
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(False)
        F.cross_entropy(wrapped(batch()[0]), batch()[1]).backward()
    else:
        model[0].requires_grad_(False)
        for p in model[0].parameters():
            if how == "no gradient":
                p.grad = None
            else:
                p.requires_grad_(True)
    before = values(model)
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(values(model), before, strict=True)]
    assert moved == [how == "trainable again"] * 2 + [True] * 2


def test_a_skipped_step_s_sum_of_what_is_frozen_now():
    model = net()
    wrapped, optimizer = clipping(model)
    optimizer.signal_skip_step(True)
    F.cross_entropy(wrapped(batch()[0]), batch()[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    model[0].requires_grad_(False)
    F.cross_entropy(wrapped(batch()[0]), batch()[1]).backward()
    with pytest.raises(StateError, match="is frozen and has a gradient"):
        optimizer.step()


@pytest.mark.parametrize("first", ["zero_grad", "freeze"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_layers_that_take_turns(first, set_to_none):
    model = net()
    wrapped, optimizer = clipping(model)
    for i in range(6):
        if first == "zero_grad":
            optimizer.zero_grad(set_to_none)
        model[0].requires_grad_(i % 2 == 0)
        model[2].requires_grad_(i % 4 != 0)
        if first == "freeze":
            optimizer.zero_grad(set_to_none)
        before = values(model)
        F.cross_entropy(wrapped(batch()[0]), batch()[1]).backward()
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(values(model), before, strict=True)]
        assert moved == [i % 2 == 0] * 2 + [i % 4 != 0] * 2


@pytest.mark.parametrize("first", ["zero_grad", "freeze"])
@pytest.mark.parametrize("how", ["momentum", "AdamW"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_frozen_stands_still(mode, how, first):
    """zero_grad() leaves zeros, as in Opacus, with which momentum and weight decay moved it, unlike plain training."""
    model = net()
    kind = partial(torch.optim.SGD, momentum=0.9) if how == "momentum" else torch.optim.AdamW
    module, optimizer, criterion = private(model, mode, kind=kind)
    for i in range(3):
        if first == "zero_grad":
            optimizer.zero_grad()
        model[0].requires_grad_(i != 1)
        if first == "freeze":
            optimizer.zero_grad()
        before = values(model)
        criterion(module(batch()[0]), batch()[1]).backward()
        optimizer.step()
        assert [not torch.equal(a, b) for a, b in zip(values(model), before, strict=True)] == [i != 1] * 2 + [True] * 2


@pytest.mark.parametrize("mode", MODES)
def test_what_is_unfrozen_after_zero_grad(mode):
    model = net()
    model[0].requires_grad_(False)
    module, optimizer, criterion = private(model, mode)
    for _ in range(2):
        x, y = batch()
        criterion(module(x), y).backward()
        before = values(model)
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(True)
    assert not torch.equal(model[0].weight, before[0])


def test_a_group_that_is_added_later():
    model = net()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    sgd = torch.optim.SGD(model[2].parameters(), lr=0.5)
    optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=N)
    sgd.add_param_group({"params": list(model[0].parameters())})
    before = values(model)
    F.cross_entropy(wrapped(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert not any(map(torch.equal, values(model), before))


@pytest.mark.parametrize("mode", MODES)
def test_the_wrapped_optimizer_s_own_step(mode):
    """Who goes on with the optimizer that make_private was given trains without noise, and nothing counts it."""
    model = net()
    module, optimizer, criterion = private(model, mode)
    x, y = batch()
    before = values(model)
    criterion(module(x), y).backward()
    with pytest.raises(StateError, match=r"without noise, and nothing accounts for this step: call step\(\)"):
        optimizer.original_optimizer.step()
    assert all(map(torch.equal, values(model), before))
    optimizer.step()
    assert not any(map(torch.equal, values(model), before))
    optimizer.zero_grad()
    if mode != "dpfast_two_pass":  # what is public may be taken by it, with hooks off
        module.disable_hooks()
        F.cross_entropy(module(x), y).backward()
        optimizer.original_optimizer.step()


@pytest.mark.parametrize("mode", [*MODES, "dpfast_compiled"])
@pytest.mark.parametrize("given", ["model", "wrapped"])
def test_a_model_that_opacus_has_hooked(mode, given):
    """Its samples counted twice in p.grad_sample, for noise of once."""
    model = net()
    wrapped, *_ = private(model, "hooks", opacus.PrivacyEngine)
    with pytest.raises(StateError, match=r"(them|hooks) already; remove the first ones with .*to_standard_module\(\)"):
        private(model if given == "model" else wrapped, mode)
    wrapped.to_standard_module()
    _, optimizer, _ = private(model, mode)
    assert isinstance(optimizer, DPOptimizer)


def test_a_compiled_step_of_the_engine_without_the_mask():
    """Padding is zeros, and how much of it there is depends on who was drawn."""
    data = DataLoader(TensorDataset(*batch()), batch_size=N // 2)
    model = net()
    step, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=C,
        grad_sample_mode="dpfast_compiled",
    )
    (x, y), valid = next(iter(loader))
    for wrong in ((x, y), ([x, y], valid), (x,)):
        with pytest.raises(InputError, match=r"would count as samples: for \(x, y\), valid in loader: step"):
            step(*wrong)
    for name in ("train", "eval", "parameters", "state_dict", "zero_grad"):
        with pytest.raises(AttributeError, match=rf"no '{name}'; the model is step\.model"):
            getattr(step, name)


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [1, 2])
def test_an_optimizer_that_accelerate_has_prepared(mode, times, accelerator):
    """It inherits ``register_step_pre_hook`` and has nowhere to put a hook; the optimizer in it has."""
    stepped = []
    for prepared in (False, True):
        model = net()
        optimizer = inner = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(times if prepared else 0):
            optimizer = type(accelerator.prepare_optimizer(inner))(optimizer)
        data = DataLoader(TensorDataset(torch.zeros(N, D), torch.zeros(N).long()), batch_size=N)
        options = {"noise_multiplier": 0.0, "max_grad_norm": 0.1, "poisson_sampling": False, "grad_sample_mode": mode}
        module, optimizer, *criterion, _ = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data, **options
        )
        criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
        torch.manual_seed(1)
        x, y = batch()
        criterion(module(x), y).backward()
        optimizer.step()
        stepped.append(values(model))
    assert all(map(torch.equal, *stepped))
    if mode != "dpfast_materialize":
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        with pytest.raises(StateError, match="clipped sums without noise"):
            inner.step()
        assert all(map(torch.equal, values(model), stepped[1]))
