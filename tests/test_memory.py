"""What a step holds at most, as the allocator counts it, beside the plain step."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS

import dpfast
from dpfast import buffers

LIMITS = {
    "one pass": (lambda m: dpfast.GradSampleModuleFastGradientClipping(m), 1.15),
    "per layer": (
        lambda m: dpfast.GradSampleModuleFastGradientClipping(m, norm_clipper=dpfast.ConstantPerLayerClipper(1.0)),
        1.05,
    ),
    "two passes": (lambda m: dpfast.GradSampleModuleFastGradientClipping(m, passes=2), 1.05),
}


def peak_bytes(model, workload, batch, monkeypatch):
    """The most that tensors hold during forward and backward, parameters included."""
    # The profiler does not see the blocks of buffers.py.
    monkeypatch.setattr(buffers, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
    loss = workload.losses(model, *batch).mean()
    loss.backward()
    del loss
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        workload.losses(model, *batch).mean().backward()
    now = peak = sum(p.nbytes for p in model.parameters())
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert len(events) > 100
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("mode", LIMITS)
def test_a_private_step_holds_little_more_than_a_plain_one(mode, monkeypatch):
    torch.manual_seed(0)
    workload = WORKLOADS["gpt"]
    model, batch = workload.build(), tuple(x[:6] for x in workload.batch())
    wrap, limit = LIMITS[mode]
    plain = peak_bytes(copy.deepcopy(model), workload, batch, monkeypatch)
    private = peak_bytes(wrap(model), workload, batch, monkeypatch)
    assert private <= limit * plain, private / plain
