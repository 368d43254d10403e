"""Which line a refusal of a capture names."""

import os

import pytest
import torch
from small_steps import Mlp, mlp_batch, square_losses

import dpfast
from dpfast.errors import UnsupportedModuleError


def test_the_line_may_stand_in_a_package_beside_torch():
    """Whose folder's name begins as torch's: torchvision, torch_geometric."""
    beside = f"{os.path.dirname(torch.__file__)}vision"
    source = "def scaled(x):\n    return x / x.abs().max().item()\n"
    namespace: dict = {}
    exec(compile(source, os.path.join(beside, "scaled.py"), "exec"), namespace)

    class Scaled(Mlp):
        def forward(self, x):
            return self.layers(namespace["scaled"](x))

    with pytest.raises(UnsupportedModuleError, match=r"reads a tensor's values at .*torchvision/scaled.py:2"):
        dpfast.compile_step(Scaled(), square_losses, max_grad_norm=0.5, batch_size=5, backend="eager")(*mlp_batch(5))
