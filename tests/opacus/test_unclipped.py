"""Optimizers that add noise to clipped sums: what is in p.grad must be one."""

import copy

import opacus
import pytest
import torch
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus_cases import opacus_example, private
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.opacus import DPOptimizerFast, OnePassOptimizer, TwoPassOptimizer
from dpfast.testing import clipped_sum, loop_over_samples

C = 0.5


def losses(module, x, y):
    return torch.nn.functional.cross_entropy(module(x), y, reduction="none")


def fast_optimizer(model):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=6)


def bound_optimizer(module, cls=OnePassOptimizer):
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    return cls(sgd, module=module, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=6)


def second_pass(module, found):
    module.zero_grad()
    module.disable_hooks()
    (module.get_clipping_coef() * found).sum().backward()
    module.enable_hooks()


@pytest.mark.parametrize("cls", [dpfast.GradSampleModule, opacus.GradSampleModule])
def test_sums_beside_grad_sample(cls):
    model, x, y = opacus_example("mlp")
    module, optimizer = cls(model), fast_optimizer(model)
    before = [p.detach().clone() for p in model.parameters()]
    losses(module, x, y).mean().backward()
    with pytest.raises(StateError, match="nobody has clipped"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("why", ["not wrapped", "a copy is", "replaced"])
def test_sums_of_a_model_that_nobody_has_wrapped(why):
    """A sample would be released as it is, and the noise is for C."""
    model, x, y = opacus_example("mlp")
    optimizer = fast_optimizer(model)
    before = [p.detach().clone() for p in model.parameters()]
    if why != "not wrapped":
        of_module = copy.deepcopy(model) if why == "a copy is" else model
        module = dpfast.GradSampleModuleFastGradientClipping(of_module, max_grad_norm=C)
        losses(module, x, y).mean().backward()
        module.zero_grad()
    losses(model, x, y).mean().backward()
    if why == "replaced":
        for p in model.parameters():
            p.grad = 100 * p.grad
    with pytest.raises(StateError, match=r"of the 6 parameters, one \(.*nobody has clipped it"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    for p in model.parameters():  # an empty batch
        p.grad = torch.zeros_like(p)
    optimizer.step()


@pytest.mark.parametrize("when", ["before the forward", "before the backward", "after a private pass", "and one more"])
@pytest.mark.parametrize("passes", [1, 2])
def test_hooks_that_were_left_disabled(when, passes):
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=passes)
    bound = bound_optimizer(module)

    def private_pass():
        found = losses(module, x, y)
        found.mean().backward(retain_graph=passes == 2)
        if passes == 2:
            second_pass(module, found)

    if when == "after a private pass":
        private_pass()
    if when == "before the backward":
        found = losses(module, x, y)
        module.disable_hooks()
    else:
        module.disable_hooks()
        found = losses(module, x, y)
    found.mean().backward()
    if when == "and one more" and passes == 1:
        module.enable_hooks()
        private_pass()
    for optimizer in (fast_optimizer(model), bound):
        with pytest.raises(StateError, match=r"enable_hooks\(\)"):
            optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_ordinary_gradients_that_are_gone_or_never_left(passes, set_to_none):
    """Of an evaluation, of torch.autograd.grad."""
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=passes)
    optimizer = fast_optimizer(model)
    for _ in range(3):
        module.disable_hooks()
        losses(module, x, y).mean().backward()
        module.enable_hooks()
        module.zero_grad(set_to_none=set_to_none)
        found = losses(module, x, y)
        found.mean().backward(retain_graph=passes == 2)
        if passes == 2:
            second_pass(module, found)
        module.disable_hooks()
        torch.autograd.grad(losses(module, x, y).mean(), list(model.parameters()))
        module.enable_hooks()
        optimizer.step()
        optimizer.zero_grad()


def test_two_passes_add_up_over_losses():
    sums = []
    for mode in ("dpfast", "dpfast_two_pass"):
        _, module, optimizer, criterion, _ = private(mode, sigma=0.0, poisson_sampling=False)
        _, x, y = opacus_example("mlp")
        for _ in range(2):  # the second step has nothing of the first
            for part in (slice(0, 2), slice(2, 6)):
                criterion(module(x[part]), y[part]).backward()
            optimizer.pre_step()
            sums.append([p.grad.clone() for p in module.parameters()])
            optimizer.zero_grad()
    for others in sums[1:]:
        for grad, other in zip(sums[0], others, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-7)
    _, module, _, criterion, _ = private("dpfast_two_pass", poisson_sampling=True)
    criterion(module(x), y).backward()
    with pytest.raises(StateError, match="Poisson sampling"):
        criterion(module(x), y).backward()


def test_two_passes_without_zero_grad_are_as_in_opacus():
    """Whose loss clears what is there: scripts of ghost mode need not."""
    _, module, optimizer, criterion, _ = private("dpfast_two_pass", sigma=1.0, poisson_sampling=False)
    _, x, y = opacus_example("mlp")
    for _ in range(2):
        criterion(module(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("installed", [True, False])
def test_opacus_optimizer_takes_two_passes_sums_once(installed):
    """It leaves what a skipped step has taken in p.grad."""
    model, x, y = opacus_example("mlp")
    exact = loop_over_samples(model, lambda m, x, y: losses(m, x, y).sum(), x, y)
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": 6}
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(sgd, **options)
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())
    exact = {name: total / 6 for name, total in clipped_sum(exact, C).items()}
    if installed:
        dpfast.opacus.install()
    try:
        for part in (slice(0, 2), slice(2, 6)):
            criterion(module(x[part]), y[part]).backward()
            optimizer.signal_skip_step(part.stop < 6)
            optimizer.pre_step()
    finally:
        dpfast.opacus.uninstall()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.double(), exact[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cls", [DPOptimizerFast, OnePassOptimizer])
@pytest.mark.parametrize("beside", ["a plain head", "a GradSampleModule", "a replaced gradient"])
def test_gradients_that_nobody_has_clipped_beside_clipped_sums(cls, beside):
    """One sample moved what was released by 1e4 C."""
    body = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(6, 6), max_grad_norm=C)
    head, shape = nn.Linear(6, 2), r"\(2, 6\)"
    head = dpfast.GradSampleModule(head) if beside == "a GradSampleModule" else head
    trained = [*body.parameters(), *head.parameters()]
    if beside == "a replaced gradient":
        trained, shape = [*body.parameters()], r"\(6,\)"
    bound = {"module": body} if cls is OnePassOptimizer else {}
    sgd = torch.optim.SGD(trained, lr=0.1)
    optimizer = cls(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=1, **bound)
    before = [p.detach().clone() for p in trained]
    head(body(torch.randn(1, 6))).sum().backward()
    if beside == "a replaced gradient":
        body.bias.grad = 1e4 * body.bias.grad
    with pytest.raises(StateError, match=rf"[12] of the [24] parameters, one {shape}, .* not clipped"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(trained, before, strict=True))


@pytest.mark.parametrize("cls", [DPOptimizerFast, OnePassOptimizer])
@pytest.mark.parametrize("passes", ["one through both", "one for each", "one for each, in skipped steps", "remembered"])
def test_two_wrapped_modules_in_one_optimizer(cls, passes):
    """Each clips to C by itself: one sample moved what was released by 1.414 C."""
    modules = [dpfast.GradSampleModuleFastGradientClipping(nn.Linear(6, 6), max_grad_norm=C) for _ in range(2)]
    trained = [p for module in modules for p in module.parameters()]
    bound = {"module": modules[0]} if cls is OnePassOptimizer else {}
    sgd = torch.optim.SGD(trained, lr=0.1)
    optimizer = cls(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=1, **bound)
    before, x = [p.detach().clone() for p in trained], torch.randn(1, 6)

    def pass_through_both():
        modules[1](modules[0](x)).sum().backward()

    if passes == "remembered":
        for _ in range(3):
            optimizer.zero_grad()
            pass_through_both()
    elif passes == "one through both":
        pass_through_both()
    else:
        for module in modules:
            module(x).sum().backward()
            if module is modules[0] and "skipped" in passes:
                optimizer.signal_skip_step()
                optimizer.step()
                optimizer.zero_grad()
    with pytest.raises(StateError, match="clipped sums of 2 wrapped modules"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(trained, before, strict=True))


def test_modules_that_may_share_a_step_or_an_optimizer():
    """One that is wrapped anew between passes; an optimizer for each; one after the other; a part of one."""
    nets = [nn.Linear(6, 6) for _ in range(2)]
    modules = [dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=C) for net in nets]
    x, optimizers = torch.randn(2, 6), [fast_optimizer(nn.ModuleList(nets)), *map(fast_optimizer, nets)]
    sgd = torch.optim.SGD([nets[0].weight], lr=0.1)
    optimizers.append(DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=6))

    def step(*some):
        before = [net.weight.detach().clone() for net in nets]
        for optimizer in some:
            optimizer.step()
            optimizer.zero_grad()
        return [not torch.equal(net.weight, weight) for net, weight in zip(nets, before, strict=True)]

    modules[1](modules[0](x)).sum().backward()
    assert step(*optimizers[1:3]) == [True, True]
    for i, module in enumerate(modules):
        module(x).sum().backward()
        assert step(optimizers[0])[i]
    modules[0](x).sum().backward()
    modules[0].remove_hooks()
    modules[0] = dpfast.GradSampleModuleFastGradientClipping(nets[0], max_grad_norm=C)
    modules[0](x).sum().backward()
    assert step(optimizers[1]) == [True, False]
    modules[0](x).sum().backward()
    assert step(optimizers[3]) == [True, False]


@pytest.mark.parametrize("before_the_forward", [False, True])
def test_a_grad_sample_module_whose_hooks_are_off(before_the_forward):
    model, x, y = opacus_example("mlp")
    module, optimizer = dpfast.GradSampleModule(model), fast_optimizer(model)
    if before_the_forward:
        module.disable_hooks()
    found = losses(module, x, y)
    module.disable_hooks()
    found.mean().backward()
    with pytest.raises(StateError, match="clips nothing"):
        optimizer.step()


@pytest.mark.parametrize("how", ["remove_hooks", "to_standard_module"])
@pytest.mark.parametrize("passes", [1, 2])
def test_hooks_that_are_gone_since_a_private_pass(how, passes):
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=passes)
    optimizers = [fast_optimizer(model), bound_optimizer(module, OnePassOptimizer if passes == 1 else TwoPassOptimizer)]
    found = losses(module, x, y)
    found.mean().backward(retain_graph=passes == 2)
    if passes == 2:
        second_pass(module, found)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # as a Trainer does
    clipped = [p.grad.clone() for p in model.parameters()]
    getattr(module, how)()
    losses(model, x, y).mean().backward()
    for optimizer in optimizers:
        with pytest.raises(StateError, match="clips nothing"):
            optimizer.step()
    for p, grad in zip(model.parameters(), clipped, strict=True):
        p.grad = grad
    with pytest.raises(StateError, match="does not hold clipped gradients"):
        optimizers[1].step()


def test_hooks_that_are_removed_before_the_step():
    """Nothing has been added; what is accumulated by a module that wraps it again is private too."""
    model, x, y = opacus_example("mlp")
    for again in (False, True):
        module, optimizer = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C), fast_optimizer(model)
        losses(module, x, y).mean().backward()
        module.remove_hooks()
        if again:
            module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
            losses(module, x, y).mean().backward()
            module.remove_hooks()
        optimizer.step()
        assert all(p.grad.any() for p in model.parameters())
        optimizer.zero_grad()


def test_two_passes_that_were_none():
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=2)
    optimizer = bound_optimizer(module, TwoPassOptimizer)
    losses(module, x, y).mean().backward()  # the first leaves norms alone
    with pytest.raises(StateError, match="does not hold clipped gradients"):
        optimizer.step()
    module.remove_hooks()
    losses(model, x, y).mean().backward()
    with pytest.raises(StateError, match="does not hold clipped gradients"):
        optimizer.step()


def test_the_model_of_a_compiled_step_that_runs_backward_by_itself():
    model, x, y = opacus_example("mlp")
    step = dpfast.compile_step(model, losses, max_grad_norm=C, batch_size=6, backend="eager")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    bound = OnePassOptimizer(sgd, module=step, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=6)
    optimizers = [fast_optimizer(model), bound]
    step(x, y)
    losses(model, x, y).mean().backward()
    for optimizer in optimizers:
        with pytest.raises(StateError, match="clips nothing"):
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
        step(x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        model.zero_grad()
    del step, optimizers, optimizer, bound
    losses(model, x, y).mean().backward()  # and nothing is left on the model
    assert not any(p._backward_hooks for p in model.parameters()) and not any(vars(p.grad) for p in model.parameters())
