"""Several private modules of one engine: their steps on one draw are one release, and nobody counts them so."""

import gc
import warnings

import pytest
import torch
from opacus_cases import perceptron, private
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, StateError
from dpfast.opacus import DPOptimizerFast

ANOTHER = "another module private.*accounted together.*wrap one module that holds both"
MODES = ["dpfast", "dpfast_two_pass", "dpfast_materialize", "dpfast_compiled", "ghost", "hooks"]

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG")


def warned(mode, **arguments):
    """make_private's answer, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = private(mode, **arguments)
    return made, [str(w.message) for w in caught if issubclass(w.category, DpfastWarning)]


@pytest.mark.parametrize("mode", MODES)
def test_a_second_one_while_the_first_lives(mode):
    """The accountant said 2.10 of two that stepped on the same batches; it was 4.25."""
    (engine, first, *_), none = warned(mode)
    assert not none
    with pytest.warns(DpfastWarning, match=ANOTHER) as caught:
        private("dpfast", model=perceptron(), engine=engine)
    assert any(w.filename.endswith("opacus_cases.py") for w in caught)  # who calls make_private
    del first


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_materialize", "dpfast_compiled"])
def test_one_after_the_other_is_gone(mode):
    made, _ = warned(mode)
    engine = made[0]
    del made
    assert not warned(mode, model=perceptron(), engine=engine)[1]


def test_one_that_is_wrapped_anew_and_engines_of_their_own():
    model = perceptron()
    (engine, first, *_), _ = warned("dpfast", model=model)
    assert not warned("dpfast", model=first, engine=engine)[1]
    first.to_standard_module()
    assert not warned("dpfast_two_pass", model=model, engine=engine)[1]
    assert not warned("dpfast", model=perceptron())[1]
    gc.collect()


def test_what_two_in_one_optimizer_are_told():
    """An optimizer for each has one draw less than its accountant believes."""
    modules = [dpfast.GradSampleModuleFastGradientClipping(nn.Linear(3, 3), max_grad_norm=1.0) for _ in range(2)]
    sgd = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
    modules[1](modules[0](torch.randn(1, 3))).sum().backward()
    with pytest.raises(StateError, match="Wrap one module that holds them all") as told:
        optimizer.step()
    assert "optimizer" not in str(told.value) and "budget" not in str(told.value)
