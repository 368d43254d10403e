"""What explain says of a model, and that it leaves no trace."""

import pytest
import torch
from torch import nn

import dpfast
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
