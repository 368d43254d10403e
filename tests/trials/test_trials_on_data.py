"""Forwards that run on no fake tensors are tried on samples themselves."""

import warnings

import numpy as np
import pytest
import torch
from noted import Noted
from torch import nn

from dpfast import GradSampleModule
from dpfast.looks import learned

N, D = 6, 4
MET = Noted()


class ReadsValues(nn.Module):
    """Its forward runs on no fake tensors, and on other numbers of samples not at all."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, 2)

    def forward(self, x, states, order):
        number = np.asarray(order.detach().cpu()).size
        MET.note((len(x), len(states)))
        if number != N and len(x) == len(states):
            raise RuntimeError("a trial that fails")
        return self.lin(x) + states.index_select(0, order)


@pytest.mark.on_cpu  # where an index that is out of range is an error, and none that is tried is fatal
@pytest.mark.parametrize("fatal", [False, True])
def test_inputs_that_do_not_fit_are_not_tried_where_an_index_is_fatal(monkeypatch, fatal):
    """On a GPU an index out of range is no error but the end of the process's work there."""
    monkeypatch.setattr(learned, "_is_an_index_fatal", lambda leaves: fatal)
    MET.clear()
    wrapped = GradSampleModule(ReadsValues())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped(torch.randn(N, D), torch.randn(N, 2), torch.arange(N))
    assert all(x == states for x, states in MET.all()) == fatal
