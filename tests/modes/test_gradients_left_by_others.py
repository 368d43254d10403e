"""What no private backward pass has left in p.grad: clipped sums are not added to it."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.modes import accumulation, held_by
from dpfast.opacus import DPOptimizerFast
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

N, C = 3, 1.0
OTHERS = r"p.grad of {} of the 4 parameters, one {}, holds what no private backward pass has left"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 10.0 * torch.randn(N, 4)


def losses(model, x):
    return model(x).square().sum(1)


def wrap(model, passes=1):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", passes=passes)


def private_pass(module, x):
    found = losses(module, x)
    found.sum().backward(retain_graph=module.passes == 2)
    if module.passes == 2:
        factors = module.get_clipping_coef()
        module.disable_hooks()
        try:
            (factors * found).sum().backward()
        finally:
            module.enable_hooks()


def exact(model, x):
    return clipped_sum(loop_over_samples(model, lambda m, x: losses(m, x).sum(), x), C)


def before_it_is_wrapped(model, x):
    losses(model, x).sum().backward()


def between_two_wrappings(model, x):
    module = wrap(model)
    module.remove_hooks()
    losses(model, x).sum().backward()
    module.add_hooks(loss_reduction="sum")
    module.remove_hooks()


def in_a_standard_module(model, x):
    losses(wrap(model).to_standard_module(), x).sum().backward()


def of_a_grad_sample_module(model, x):
    module = dpfast.GradSampleModule(model, loss_reduction="sum")
    losses(module, x).sum().backward()
    module.remove_hooks()


def of_a_clipper(model, x):
    """What is released comes from sums that another clipped."""
    clipper = dpfast.PerSampleGradientClipper(model, dpfast.ConstantFlatClipper(100 * C), loss_reduction="sum")
    losses(model, x).sum().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    clipper.close()


OTHER_PASSES = [
    before_it_is_wrapped,
    between_two_wrappings,
    in_a_standard_module,
    of_a_grad_sample_module,
    of_a_clipper,
]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("leave", OTHER_PASSES)
def test_gradients_of_other_passes_are_refused(leave, passes):
    """One sample moved the released sum by 2.7e4 C."""
    model, x = net()
    whole = exact(model, x)
    leave(model, x)
    before = [p.grad.clone() for p in model.parameters()]
    module = wrap(model, passes)
    with pytest.raises(StateError, match=OTHERS.format(4, r"0.weight \(5, 4\)")):
        private_pass(module, x)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    assert held_by(model.parameters()) is None
    module.zero_grad()
    private_pass(module, x)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, whole[name]) <= 1e-5


@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("passes", [1, 2])
def test_sums_that_are_replaced_between_passes_are_refused(passes, which):
    """With the note went the number of passes and the bound."""
    model, x = net()
    module = wrap(model, passes)
    private_pass(module, x)
    for p in model.parameters() if which == "all" else [model[2].bias]:
        p.grad = 100 * p.grad
    name = r"0.weight \(5, 4\)" if which == "all" else r"2.bias \(3,\)"
    with pytest.raises(StateError, match=OTHERS.format(4 if which == "all" else 1, name)):
        private_pass(module, x)


@pytest.mark.parametrize("passes", [1, 2])
def test_sums_that_are_changed_in_place_keep_their_note(passes):
    model, x = net()
    whole, module = exact(model, torch.cat([x, x + 1])), wrap(model, passes)
    for k in range(2):
        private_pass(module, x + k)
        for p in model.parameters():
            p.grad.mul_(0.5 if k else 1.0)
    assert held_by(model.parameters()).passes == 2
    for name, p in model.named_parameters():
        assert relative_error(p.grad, 0.5 * whole[name]) <= 1e-5


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clear", ["module", "sgd", "private", "by hand"])
def test_zeros_are_nobodys(clear, passes):
    """As optimizers leave them that keep the tensors."""
    model, x = net()
    whole, module = exact(model, x), wrap(model, passes)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    private = DPOptimizerFast(sgd, noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=1, loss_reduction="sum")
    for step in range(3):
        private_pass(module, x)
        assert held_by(model.parameters()).passes == 1
        for name, p in model.named_parameters():
            assert relative_error(p.grad, whole[name]) <= 1e-5
        if step:
            private.step()
            private.zero_grad()
        if clear == "by hand":
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        else:
            {"module": module, "sgd": sgd, "private": private}[clear].zero_grad(set_to_none=False)


def test_zeros_of_a_private_optimizer_are_not_looked_at(monkeypatch):
    """On a GPU that would be a wait in every step."""
    model, x = net()
    module = wrap(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    private = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=1)
    read, not_zeros = [], accumulation._not_zeros
    monkeypatch.setattr(accumulation, "_not_zeros", lambda those: read.extend(those) or not_zeros(those))
    for _ in range(3):
        private_pass(module, x)
        private.step()
        private.zero_grad()  # which keeps the tensors
    assert not read


def test_zeros_that_an_optimizer_has_left_may_be_written_to():
    model, x = net()
    module = wrap(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    private = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=1)
    private_pass(module, x)
    private.step()
    private.zero_grad()
    model[0].bias.grad.add_(1.0)
    with pytest.raises(StateError, match=OTHERS.format(1, r"0.bias \(5,\)")):
        private_pass(module, x)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_generator_learns_through_a_critic_that_has_stepped(passes):
    """As in torch's and Opacus's DCGAN, which clear the critic's gradients later."""
    critic, x = net()
    module, generator = wrap(critic, passes), nn.Linear(4, 4)
    sgd = torch.optim.SGD(critic.parameters(), lr=0.1)
    private = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=N)
    for _ in range(2):
        private.zero_grad()
        private_pass(module, x)
        private.step()
        private_pass(module, generator(x))
        assert all(p.grad.any() for p in generator.parameters())
        with pytest.raises(ValueError, match="haven't been cleared"):
            private.step()
