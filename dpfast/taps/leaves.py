"""Where the history of what has no samples ends: a gradient that is left there is an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from dpfast.arithmetic import is_traced
from dpfast.errors import EscapedGradientError


def leaf(value: Tensor, layer: str, parameter: str = "") -> Tensor:
    """``value`` without its history, ready for gradients, which may only be asked for: one that is left is an error.

    Args:
        parameter: a module's number and the name in it, where the value stands in a parameter's place.
    """
    value = value.detach().requires_grad_()
    value.register_post_accumulate_grad_hook(partial(_refuse, layer, parameter))
    return value


def without_values(layer: str, value: FakeTensor) -> Tensor:
    """What a tensor on fake ones is where torch asks no subclass: in the arguments of an ``autograd.Function``. In a
    graph that is captured, a gradient that comes by there is an error. Where nothing is recorded it has no gradient."""
    recorded = torch.is_grad_enabled()
    with unset_fake_temporarily():
        if not is_traced():  # a forward pass that is looked at
            return torch.empty(0, requires_grad=recorded)
        of_nan: Any = torch.full((), torch.nan, dtype=value.dtype, device=value.device)
        found = of_nan.expand(value.shape)
    if not recorded:
        return found
    found.requires_grad_().register_hook(partial(_refuse, layer, ""))
    found.refuses = True
    return found


def refuses(x: Tensor) -> bool:
    """Whether a gradient that comes to ``x`` is an error by itself, in the name of what it stands for."""
    return hasattr(x, "refuses")


def _refuse(layer: str, parameter: str, x: Tensor) -> None:
    which = f", {parameter.partition('.')[2]} {tuple(x.shape)}" if parameter else ""
    raise EscapedGradientError(
        f"{layer}{which}: a gradient reached a parameter of it, or what it made without samples, without being "
        "clipped, or parted by samples: what it meets the samples in is not known to have per-sample gradients, or was "
        "not seen in forward passes on fake tensors. Expand it to the batch before, register a rule for the module "
        "that uses it (dpfast.register_rule), or freeze it"
    )
