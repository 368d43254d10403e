"""What a step holds at most, as tensors, beside the plain step."""

import copy

import pytest
import torch
from memory import peak_of_tensors
from workloads import WORKLOADS

import dpfast

pytestmark = pytest.mark.on_cpu

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


def peaks(mode, n):
    """Of the plain step and of the private one, and how much the latter may have."""
    torch.manual_seed(0)
    workload = WORKLOADS["gpt"]
    model, batch = workload.build(), tuple(x[:n] for x in workload.batch())
    wrap, limit = LIMITS[mode]
    plain = peak_bytes(copy.deepcopy(model), workload, batch)
    return plain, peak_bytes(wrap(model), workload, batch), limit


@pytest.mark.parametrize("mode", LIMITS)
def test_a_private_step_holds_little_more_than_a_plain_one(mode):
    plain, private, limit = peaks(mode, 16)  # the workload's own
    assert private <= limit * plain, private / plain


def test_biases_alone_hold_what_a_plain_step_holds():
    torch.manual_seed(0)
    workload = WORKLOADS["gpt"]
    model, batch = workload.build(), tuple(x[:8] for x in workload.batch())
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    plain = peak_bytes(copy.deepcopy(model), workload, batch)
    private = peak_bytes(dpfast.GradSampleModuleFastGradientClipping(model), workload, batch)
    assert private <= 1.02 * plain, private / plain


def test_what_does_not_grow_with_the_batch():
    """Sums, and one sample's gradients of the layers that are taken in turn."""
    plain, private, limit = peaks("one pass", 4)
    sums = 4 * (4 * (256 * 1024 * 3 + 14 * 256) + 2 * 1000 * 256 + 130 * 256)
    in_turn = 4 * (4 * (256 * 768 + 2 * 256 * 1024) + 1000 * 256)
    assert private <= limit * plain + sums + in_turn, (private - limit * plain - sums) / 2**20


def test_a_look_holds_little_more_than_a_plain_step(monkeypatch):
    """The first forward pass looks at eight samples, here the whole batch, forwards and backwards. (In a process that
    works on a GPU it has attention write its scores out, too.)"""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    torch.manual_seed(0)
    workload = WORKLOADS["gpt"]
    model, batch = workload.build(), tuple(x[:8] for x in workload.batch())
    plain = peak_bytes(copy.deepcopy(model), workload, batch)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model)
    look = peak_of_tensors(lambda: workload.losses(wrapped, *batch), model.parameters())
    assert look <= 1.2 * plain, look / plain
