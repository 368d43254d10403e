"""One-pass and two-pass optimizers: what they take, how often, and for how much noise."""

import pytest
import torch
from cases import assert_gradients, mean_loss, sum_loss
from opacus_cases import opacus_example
from torch import nn

import dpfast
from dpfast.errors import InputError, StateError
from dpfast.opacus import DPOptimizerFast, OnePassOptimizer, TwoPassOptimizer
from dpfast.testing import clipped_sum, loop_over_samples

C = 0.5


def one_pass(model, sigma=0.0, cls=OnePassOptimizer, lr=1.0, norm_clipper=None, C=C):
    passes = 2 if cls is TwoPassOptimizer else 1
    module = dpfast.GradSampleModuleFastGradientClipping(
        model, max_grad_norm=C, passes=passes, norm_clipper=norm_clipper
    )
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = cls(sgd, module=module, noise_multiplier=sigma, max_grad_norm=C, expected_batch_size=1)
    return module, optimizer


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("clear", ["optimizer", "optimizer, to zero", "module", "nothing"])
def test_a_skipped_step_takes_each_gradient_once(clear):
    model, x, y = opacus_example("mlp")
    exact = clipped_sum(loop_over_samples(model, sum_loss, x, y), C)
    module, optimizer = one_pass(model)
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        mean_loss(module, x[part], y[part]).backward()
        optimizer.signal_skip_step(part.stop < 6)
        optimizer.pre_step()
        if part.stop < 6:
            if clear.startswith("optimizer"):
                optimizer.zero_grad(set_to_none=clear == "optimizer")
            elif clear == "module":
                module.zero_grad()
    assert_gradients(gradients(model), exact)


def test_step_without_a_backward_pass():
    model, x, y = opacus_example("mlp")
    module, optimizer = one_pass(model)
    with pytest.raises(StateError, match="no backward pass"):
        optimizer.step()
    mean_loss(module, x, y).backward()
    optimizer.step()
    with pytest.raises(StateError, match="no backward pass"):
        optimizer.step()  # p.grad holds what has been released: not to be taken again


@pytest.mark.parametrize("samples", [6, 0])
def test_a_trainer_that_measures_the_norm_of_the_sum(samples):
    model, x, y = opacus_example("mlp", samples)
    module, optimizer = one_pass(model)
    mean_loss(module, x, y).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.pre_step()
    assert_gradients(gradients(model), expected)


def test_forgotten_zero_grad_after_a_full_step():
    model, x, y = opacus_example("mlp")
    module, optimizer = one_pass(model)
    mean_loss(module, x, y).backward()
    optimizer.step()
    mean_loss(module, x, y).backward()
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.step()


def test_a_parameter_that_the_step_does_not_use_gets_noise():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    model = Two()
    module, optimizer = one_pass(model, sigma=1.0)
    module(torch.ones(4, 3)).mean().backward()
    optimizer.step()
    assert model.unused.weight.grad.abs().min() > 0


@pytest.mark.parametrize("later", [C / 4, 4 * C])
def test_noise_covers_the_threshold_that_was_clipped_to(later):
    """A scheduler between backward and step must not lower the noise below what one sample has moved."""
    torch.manual_seed(0)
    model = nn.Linear(100, 100, bias=False)
    module, optimizer = one_pass(model, sigma=1.0)
    module(torch.zeros(2, 100)).mean().backward()
    optimizer.max_grad_norm = later
    assert module.sensitivity == later
    optimizer.pre_step()
    assert float(model.weight.grad.std()) == pytest.approx(max(C, later), rel=0.05)
    optimizer.zero_grad()
    module(torch.zeros(2, 100)).mean().backward()
    optimizer.pre_step()
    assert float(model.weight.grad.std()) == pytest.approx(later, rel=0.05)


@pytest.mark.parametrize("clipper", [None, dpfast.ConstantPerLayerClipper([C / 6**0.5] * 6)])
def test_noise_for_less_than_the_module_clips_to_is_refused(clipper):
    """An optimizer that is not bound to the module has a ``max_grad_norm`` of its own."""
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, norm_clipper=clipper)
    optimizer = DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=C, expected_batch_size=1
    )
    mean_loss(module, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    mean_loss(module, x, y).backward()
    optimizer.max_grad_norm = C / 2
    with pytest.raises(StateError, match=r"the noise is for max_grad_norm=0\.25"):
        optimizer.step()


def test_max_grad_norm_sets_what_the_module_clips_to():
    model, _, _ = opacus_example("mlp")
    clippers = (
        None,
        dpfast.AutomaticClipper(C),
        dpfast.ConstantPerLayerClipper([C / 6**0.5] * 6),
    )
    for clipper in clippers:
        module, optimizer = one_pass(model, norm_clipper=clipper)
        assert module.sensitivity == pytest.approx(C)
        optimizer.max_grad_norm = 2 * C
        assert module.sensitivity == pytest.approx(2 * C) and optimizer.max_grad_norm == 2 * C
        for bad in (0.0, float("nan")):
            with pytest.raises(InputError, match="positive finite"):
                optimizer.max_grad_norm = bad
        module.to_standard_module()

    class Own(dpfast.NormClipper):
        thresholds = torch.tensor([C])

        def calc_clipping_factors(self, norms):
            return [torch.full_like(norm, 0.1) for norm in norms]

    _, optimizer = one_pass(model, norm_clipper=Own())
    with pytest.raises(InputError, match=r"Own clips to 0\.5"):
        optimizer.max_grad_norm = 2 * C


def test_closures():
    model, x, y = opacus_example("mlp")
    exact = clipped_sum(loop_over_samples(model, sum_loss, x, y), C)
    module, optimizer = one_pass(model, lr=0.0)

    def closure():
        optimizer.zero_grad()
        mean_loss(module, x, y).backward()

    optimizer.step(closure)
    assert_gradients(gradients(model), exact)


@pytest.mark.parametrize("cls", [OnePassOptimizer, TwoPassOptimizer])
def test_low_precision_parameters(cls):
    model = nn.Linear(8, 4).to(torch.bfloat16)
    module, optimizer = one_pass(model, sigma=1.0, cls=cls)
    losses = module(torch.randn(6, 8, dtype=torch.bfloat16)).sum(1)
    losses.mean().backward(retain_graph=cls is TwoPassOptimizer)
    if cls is TwoPassOptimizer:
        module.disable_hooks()
        (module.get_clipping_coef() * losses).sum().backward()
        module.enable_hooks()
    optimizer.step()
    assert model.weight.grad.dtype == torch.bfloat16 and torch.isfinite(model.weight).all()


def fast(model, lr=1.0, sigma=1.0):
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return DPOptimizerFast(sgd, noise_multiplier=sigma, max_grad_norm=C, expected_batch_size=2)


def test_threshold_is_lowered_within_a_step():
    """What waits in a virtual step was clipped to more than the noise would be for."""
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    optimizer = fast(model)
    mean_loss(module, x[:3], y[:3]).backward()
    optimizer.signal_skip_step(True)
    optimizer.step()
    optimizer.zero_grad()
    module.max_grad_norm = optimizer.max_grad_norm = 0.01 * C
    mean_loss(module, x[3:], y[3:]).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StateError, match="between whole steps"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for p in model.parameters():  # which no note tells of
        p.grad = torch.zeros_like(p)
    with pytest.raises(StateError, match=f"set it back to {C}"):
        optimizer.step()
    optimizer.max_grad_norm = C  # noise for the larger one is enough
    optimizer.step()


def test_step_that_fails_leaves_nothing_to_the_next():
    model, x, y = opacus_example("mlp")
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    optimizer = fast(model)
    seen = []

    def fail(optimizer):
        raise OSError("the accountant's store is down")

    optimizer.attach_step_hook(fail)
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        mean_loss(module, x[part], y[part]).backward()
    with pytest.raises(OSError, match="store"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.attach_step_hook(lambda of: seen.append(of.accumulated_iterations))
    mean_loss(module, x[:2], y[:2]).backward()
    optimizer.step()
    assert seen == [1]
