"""torch.compile of a wrapped model: what stands in front of taps is no code to be compiled."""

import pytest
import torch
from torch import nn

import dpfast


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_taps_are_not_compiled_anew_for_each_kind_of_arguments(when):
    """Dynamo came to its limit, said so, and named dpfast's code."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    before = when == "before wrapping"
    wrapped = dpfast.GradSampleModuleFastGradientClipping(torch.compile(net, backend="eager") if before else net)
    called = wrapped if before else torch.compile(wrapped, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for n in (8, 8, 5, 1, 12):
            called(torch.randn(n, 6)).square().sum(1).mean().backward()
            assert wrapped.get_norm_sample().shape == (n,)
            wrapped.zero_grad()
