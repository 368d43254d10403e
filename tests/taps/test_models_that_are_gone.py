"""What is known of a wrapped model goes with it."""

import gc

import torch
from torch import nn

import dpfast
from dpfast.modes import blocks
from dpfast.taps import layout


def test_nothing_is_kept_of_models_that_are_gone():
    """A later model at the same place in memory was of their kind."""
    others = layout._here.kinds.keyrefs()  # of earlier tests, which may go at any time
    model = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(3, 2))
    with model.units(torch.arange(4), 4):
        model(torch.randn(4, 3)).sum(1).mean().backward()
    with model.valid(torch.ones(4, dtype=torch.bool)):
        model(torch.randn(4, 3))
    assert not blocks.UNITS._of and not blocks.VALID._of
    (kept,) = (key for key in layout._here.kinds.keyrefs() if all(key is not other for other in others))
    assert kept() is not None
    del model
    gc.collect()
    assert kept() is None and kept not in layout._here.kinds.keyrefs()
