"""Counting what was dropped, and no wait for a GPU in a step."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import example

import dpfast
from dpfast.errors import DpfastWarning
from dpfast.modes.nonfinite_samples import DroppedSamples


def test_counts_add_up_and_warn_once():
    dropped = DroppedSamples()
    finite = torch.ones(3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dropped.add(finite.unsqueeze(0))
        dropped.add(finite[:0].unsqueeze(0))
    bad = torch.tensor([[1.0, torch.inf, 2.0], [torch.nan, torch.inf, 2.0]])  # one norm a parameter
    with pytest.warns(DpfastWarning, match="2 of 3 samples"):
        dropped.add(bad)
        assert dropped.count == 2  # a GPU's arrives when it is asked for
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dropped.add(bad[:1])
    assert dropped.count == copy.deepcopy(dropped).count == 3


def test_one_number_a_sample():
    """As the modes give it where gradients that came otherwise than they were given are at fault."""
    dropped = DroppedSamples()
    dropped.add(torch.zeros(1))
    dropped.add(torch.zeros(0))
    with pytest.warns(DpfastWarning, match="1 of 2 samples"):
        dropped.add(torch.tensor([torch.nan, 1.0]))
        assert dropped.count == 1  # of a GPU known when it is asked for


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_a_step_does_not_wait_for_the_gpu(name):
    model, x, y = example(name)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)

    def loss():  # F.cross_entropy's own mean is asked whether it leaves targets out
        return F.cross_entropy(wrapped(x).flatten(1), y, reduction="none").mean()

    for _ in range(2):  # which are looked at; kernels are compiled here
        loss().backward()
        wrapped.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wrapped.nonfinite_samples == 0
