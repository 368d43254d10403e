"""Arguments of another kind than asked for: the error says what is wanted, and nothing has happened."""

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn

import dpfast
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.opacus import DPOptimizerFast
from dpfast.taps import registry
from dpfast.testing import check_rule

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
MODES = [
    dpfast.GradSampleModule,
    dpfast.GradSampleModuleFastGradientClipping,
    lambda model: dpfast.PerSampleGradientClipper(model, dpfast.ConstantFlatClipper(1.0)),
    lambda model: dpfast.compile_step(model, lambda m, x: m(x).sum(1), max_grad_norm=1.0, batch_size=4),
]


@pytest.mark.parametrize("mode", MODES)
def test_a_function_is_no_model(mode):
    with pytest.raises(InputError, match=r"is no torch\.nn\.Module"):
        mode(torch.tanh)


@pytest.mark.parametrize("losses", [nn.CrossEntropyLoss(), torch.ones(4)])
def test_losses_are_called_with_the_model(losses):
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match="called with the model and the batch, and gives one loss a sample"):
        dpfast.compile_step(model, losses, max_grad_norm=1.0, batch_size=4)
    dpfast.GradSampleModule(model)  # has no hooks


def test_losses_may_be_a_module():
    class Losses(nn.Module):
        def forward(self, model, x):
            return model(x).sum(1)

    model = nn.Linear(3, 2)
    dpfast.compile_step(model, Losses(), max_grad_norm=1.0, batch_size=4, backend="eager")(X)
    assert model.weight.grad is not None


ANSWERS = {
    "a tensor": (lambda layer: torch.ones(4, 3), r"gives a Tensor, and not \{layer\.weight: grad_sample"),
    "nothing": (lambda layer: None, r"gives None, and not \{layer\.weight: grad_sample"),
    "numbers": (lambda layer: {layer.weight: [1.0] * 4}, r"gives a list for its parameter \(3,\), and not a tensor"),
    "by name": (lambda layer: {"weight": [1.0] * 4}, "gives a list for 'weight', and not a tensor"),
    "tensors by name": (lambda layer: {"weight": torch.ones(4, 3)}, r"gives no gradient of parameter 0\.weight"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_grad_sampler_gives_tensors_by_parameter(name):
    answer, match = ANSWERS[name]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    dpfast.register_grad_sampler(Own)(lambda layer, activations, backprops: answer(layer))
    model = dpfast.GradSampleModule(nn.Sequential(Own(), nn.Linear(3, 2)))
    with pytest.raises(UnsupportedModuleError, match=rf"0 \(Own\).*{match}"):
        model(X).sum().backward()
    registry.RULES.pop(Own)
    registry.GRAD_SAMPLERS.pop(Own)


def test_check_rule_wants_something_to_compare():
    with pytest.raises(InputError, match="no parameter of Linear is trainable"):
        check_rule(nn.Linear(3, 2).requires_grad_(False), X)


def _private(optimizer, **options):
    return DPOptimizerFast(
        optimizer, **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4, **options}
    )


@pytest.mark.parametrize("threshold", [-1, 0, "1", None, float("nan"), float("inf")])
def test_an_optimizers_threshold_is_a_positive_number(threshold):
    with pytest.raises(InputError, match=r"max_grad_norm=.* must be a positive finite number"):
        _private(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), max_grad_norm=threshold)


def test_a_private_optimizer_wraps_an_ordinary_one():
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for private in (
        _private(sgd),
        DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4),
    ):
        with pytest.raises(InputError, match="is private already"):
            _private(private)
    with pytest.raises(InputError, match=r"optimizer=Linear is no torch\.optim\.Optimizer"):
        _private(model)
