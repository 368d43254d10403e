"""Opacus's ghost clipping with dpfast's optimizer: its first backward pass alone leaves what nobody has clipped."""

import pytest
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhost
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus_cases import opacus_example
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.opacus import DPOptimizerFast
from dpfast.testing import clipped_sum, loop_over_samples

C = 0.5


def losses(module, x, y):
    return nn.functional.cross_entropy(module(x), y, reduction="none")


def ghost(model):
    """Opacus's ghost clipping with dpfast's optimizer, without noise."""
    module = OpacusGhost(model, max_grad_norm=C)
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": 6}
    optimizer = DPOptimizerFast(torch.optim.SGD(module.parameters(), lr=0.1), **options)
    return module, optimizer, DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())


@pytest.mark.parametrize("installed", [True, False])
def test_the_first_pass_of_ghost_clipping_alone(installed):
    """It leaves norms and the sum of gradients that nobody has clipped; norms of the last step are there as well."""
    model, x, y = opacus_example("mlp")
    exact = clipped_sum(loop_over_samples(model, lambda m, x, y: losses(m, x, y).sum(), x, y), C)
    module, optimizer, criterion = ghost(model)
    plain = nn.CrossEntropyLoss()
    before = [p.detach().clone() for p in model.parameters()]
    if installed:
        dpfast.opacus.install()
    try:
        for _ in range(2):
            with pytest.raises(StateError, match="of a single backward pass of ghost clipping"):
                plain(module(x), y).backward()
                optimizer.step()
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.pre_step()
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad.double(), exact[name] / 6, rtol=1e-4, atol=1e-7)
            optimizer.zero_grad()
        module.disable_hooks()
        plain(module(x), y).backward()
        with pytest.raises(StateError, match="of a single backward pass"):
            optimizer.step()
    finally:
        dpfast.opacus.uninstall()


def test_ghost_clipping_by_hand_and_in_parts_of_a_step():
    model, x, y = opacus_example("mlp")
    exact = clipped_sum(loop_over_samples(model, lambda m, x, y: losses(m, x, y).sum(), x, y), C)
    module, optimizer, criterion = ghost(model)
    for by_hand in (True, False, True):
        for part in (slice(0, 2), slice(2, 6)):
            if by_hand:
                found = losses(module, x[part], y[part])
                found.mean().backward(retain_graph=True)
                optimizer.zero_grad()
                module.disable_hooks()
                (module.get_clipping_coef() * found).sum().backward()
                module.enable_hooks()
            else:
                criterion(module(x[part]), y[part]).backward()
            optimizer.signal_skip_step(part.stop < 6)
            optimizer.pre_step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.double(), exact[name] / 6, rtol=1e-4, atol=1e-7)
        optimizer.zero_grad()
