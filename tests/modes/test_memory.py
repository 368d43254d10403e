"""What a step holds at most, as tensors, beside the plain step."""

import copy

import pytest
import torch
from memory import peak_of_tensors
from workloads import WORKLOADS

import dpfast

LIMITS = {
    "one pass": (lambda m: dpfast.GradSampleModuleFastGradientClipping(m), 1.15),
    "per layer": (
        lambda m: dpfast.GradSampleModuleFastGradientClipping(m, norm_clipper=dpfast.ConstantPerLayerClipper(1.0)),
        1.05,
    ),
    "two passes": (lambda m: dpfast.GradSampleModuleFastGradientClipping(m, passes=2), 1.05),
}


def peak_bytes(model, workload, batch):
    """Of forward and backward, parameters included."""

    def run():
        workload.losses(model, *batch).mean().backward()

    run()
    model.zero_grad(set_to_none=True)
    return peak_of_tensors(run, model.parameters())


@pytest.mark.parametrize("mode", LIMITS)
def test_a_private_step_holds_little_more_than_a_plain_one(mode):
    torch.manual_seed(0)
    workload = WORKLOADS["gpt"]
    model, batch = workload.build(), tuple(x[:6] for x in workload.batch())
    wrap, limit = LIMITS[mode]
    plain = peak_bytes(copy.deepcopy(model), workload, batch)
    private = peak_bytes(wrap(model), workload, batch)
    assert private <= limit * plain, private / plain
