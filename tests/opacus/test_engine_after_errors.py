"""A make_private that fails leaves the module as it was, so that the corrected call is taken."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dpfast
from dpfast.distributed import PoissonBatches, SharedSecret
from dpfast.errors import DpfastError, InputError, StateError
from dpfast.opacus import DPOptimizerFast, PrivacyEngine

PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [1.0]}
WRONG = {
    "negative threshold": {"max_grad_norm": -1.0},
    "a negative one of several": {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0, -1.0, 1.0]},
    "too few thresholds": PER_LAYER,
    "too few thresholds, compiled": {**PER_LAYER, "grad_sample_mode": "dpfast_compiled"},
    "too few thresholds, materialized": {**PER_LAYER, "grad_sample_mode": "dpfast_materialize"},
    "NaN, materialized": {"max_grad_norm": torch.nan, "grad_sample_mode": "dpfast_materialize"},
    "negative noise": {"noise_multiplier": -1.0},
    "no number of noise": {"noise_multiplier": torch.nan, "grad_sample_mode": "dpfast_materialize"},
    "noise that is a string": {"noise_multiplier": "1", "grad_sample_mode": "dpfast_materialize"},
    "whose records are": {"user_of_record": torch.arange(3)},
}


def data(n=40):
    return DataLoader(TensorDataset(torch.randn(n, 5), torch.zeros(n).long()), batch_size=8)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.randn(5), 0)])


def make(net, loader=None, **options):
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=data() if loader is None else loader, **options
    )


def net():
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))


def is_plain(model):
    return all("forward" not in vars(m) for m in model.modules()) and not any(
        p._backward_hooks for p in model.parameters()
    )


@pytest.mark.parametrize("wrong", WRONG)
def test_the_corrected_call_is_taken(wrong):
    model = net()
    with pytest.raises(InputError):
        make(model, **WRONG[wrong])
    assert is_plain(model)
    make(model)


def test_errors_of_opacus_leave_the_module_too():
    model = net()
    with pytest.raises(ValueError, match="IterableDataset"):
        make(model, DataLoader(Stream()))
    assert is_plain(model)
    make(model)


def test_a_module_that_was_wrapped_before_stays_wrapped():
    wrapped = dpfast.GradSampleModuleFastGradientClipping(net())
    with pytest.raises(DpfastError):
        make(wrapped, user_of_record=torch.arange(3))
    assert not is_plain(wrapped._module)
    make(wrapped)


def test_flat_clipping_of_a_module_that_clips_per_layer():
    model, *_ = make(net(), clipping="per_layer", max_grad_norm=[1.0] * 4)
    with pytest.raises(StateError, match="norm_clipper = None"):
        make(model)
    model.norm_clipper = None
    model, *_ = make(model)
    model(torch.randn(4, 5)).sum(1).mean().backward()
    assert model.get_clipping_coef().shape == (4,)


def test_the_default_criterion_reduces_as_the_loss_does():
    model, optimizer, criterion, _ = make(net(), grad_sample_mode="dpfast_two_pass", loss_reduction="sum")
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    loss = criterion(model(x), y)
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(model(x), y, reduction="sum").item(), rel=1e-5)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{"noise_multiplier": -1.0}, {"expected_batch_size": 0}])
def test_optimizer_of_ones_own(options):
    sgd = torch.optim.SGD(net().parameters(), lr=1.0)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4, **options}
    with pytest.raises(InputError, match=next(iter(options))):
        DPOptimizerFast(sgd, **given)


def test_expected_units_are_not_rounded_below_a_whole_number():
    """98 · (1/49) is less than 2 in floating point."""
    users = torch.arange(98).repeat_interleave(2)
    loader = DataLoader(TensorDataset(torch.randn(196, 5), torch.zeros(196).long()), batch_size=4)
    assert len(loader) == 49
    _, optimizer, _ = make(net(), loader, user_of_record=users)
    assert optimizer.expected_batch_size == 2


def test_poisson_batches_in_one_process():
    batches = PoissonBatches(1000, 0.1, SharedSecret.agreed())
    assert sum(map(len, batches)) == pytest.approx(1000, abs=150) and len(batches) == 10
