"""What Opacus's ghost clipping has no norm of is refused while dpfast is installed."""

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn

import dpfast.opacus
from dpfast.errors import EscapedGradientError

C = 0.5

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")


@pytest.fixture(autouse=True)
def _installed():
    dpfast.opacus.install()
    yield
    dpfast.opacus.uninstall()


def ghost_step(model, losses, x, y):
    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, strict=False)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=1,
    )
    DPTensorFastGradientClipping(private, optimizer, losses(private, x, y), "mean").backward()


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


class Keeps(nn.Sequential):
    """Its losses are of what a hook has kept, too."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        self.kept = {}
        self[0].register_forward_hook(lambda module, args, output: self.kept.update(h=output))


def auxiliary(model, x, y):
    losses = cross_entropy(model, x, y)
    return losses + 10.0 * model._module.kept["h"].square().sum(1)


def unfrozen(model, x, y):
    model._module[0].requires_grad_(True)
    return cross_entropy(model, x, y)


def penalised(model, x, y):
    return cross_entropy(model, x, y) + model._module[2].weight.square().sum()


@pytest.mark.parametrize("losses, name", [(auxiliary, "0"), (unfrozen, "0"), (penalised, "2")])
def test_what_opacus_s_norms_are_without_is_refused(losses, name):
    """It was added unclipped: one sample moved the sum by 83 C with a kept feature, by 830 C with an unfrozen layer."""
    model = Keeps()
    if losses is unfrozen:
        model[0].requires_grad_(False)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(EscapedGradientError, match=rf"parameter {name}\.weight .* does not measure, and would add"):
        ghost_step(model, losses, x, y)
    assert all(p.grad is None for p in model.parameters())
