"""What explain says of a model, and that it leaves no trace."""

import pytest
import torch
from torch import nn

import dpfast
import dpfast.opacus
from dpfast.errors import InputError


def test_explain():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 5), nn.PReLU())
    x = torch.randn(3, 2, 8)
    for wrap in (lambda m: m, dpfast.GradSampleModule):
        wrapped = wrap(model)
        state = torch.get_rng_state()
        found = dpfast.explain(wrapped, x)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.parameters())
        ways = {use.parameter: (use.rule, use.way, use.shape) for use in found.uses}
        assert ways["0.weight"] == ("convolution", "keep", (6, 6, 4))
        assert ways["2.weight"] == ("linear", "rank_one", (1, 24, 5))
        assert found.num_samples == 3 and found.fallbacks == ("3 (PReLU)",)
        assert "3 (PReLU)" in str(found) and "without a rule: 3 (PReLU)" in str(found)
    dpfast.explain(wrapped, x)
    wrapped(x).sum().backward()
    assert model[0].weight.grad_sample.shape == (3, 4, 2, 3)
    with pytest.raises(InputError, match="no trainable parameter"):
        dpfast.explain(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.inner = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x + self.positions)


def test_a_parameter_without_a_layer_has_its_samples_in_front():
    """They were said to be assumed there, with a remedy that changes nothing."""
    found = dpfast.explain(Positions(), torch.randn(5, 6, 4))
    assert {use.parameter: use.samples for use in found.uses} == {
        "positions": "0",
        "inner.weight": "0",
        "inner.bias": "0",
    }
    assert "could not be run to find out" not in found.html(lambda y: y.square().sum())


@pytest.mark.parametrize("width", [8, 64])
def test_a_standardised_convolution_is_the_convolution_that_it_is_made_of(width):
    modeling_bit = pytest.importorskip("transformers.models.bit.modeling_bit")
    torch.manual_seed(0)
    of_bit = modeling_bit.WeightStandardizedConv2d(width, width, 3, padding=1)
    x = torch.randn(3, width, 6, 6)
    (plain,) = dpfast.explain(nn.Conv2d(width, width, 3, padding=1, bias=False), x).uses
    found = dpfast.explain(of_bit, x)
    (use,) = found.uses
    assert (use.way, use.shape, use.flops, use.kept_bytes) == (plain.way, plain.shape, plain.flops, plain.kept_bytes)
    assert use.way != "dense"
    (cost,) = found.measure(lambda y: y.square().sum()).costs
    assert cost.taken == use.way and cost.way.norm > 0.0


def test_what_is_measured_before_a_step_leaves_the_step():
    """Sums that a backward pass had left were taken for some that nobody has clipped."""
    torch.manual_seed(0)
    model = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(4, 3), max_grad_norm=0.1)
    optimizer = dpfast.opacus.DPOptimizerFast(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=5
    )
    x = torch.randn(5, 4)
    found = dpfast.explain(model, x)
    before = model._module.weight.detach().clone()
    model(x).square().sum(1).mean().backward()
    left = model._module.weight.grad.clone()
    found.measure(lambda y: y.square().sum())
    assert torch.equal(model._module.weight.grad, left)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    assert torch.allclose(model._module.weight, before - left / 5, atol=1e-6)
