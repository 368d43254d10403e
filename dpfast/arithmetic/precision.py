"""In which dtype sums are taken, what its arithmetic may lose, and what must not round it further."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()


def exact_arithmetic() -> AbstractContextManager[object]:
    """Autocast off: our own arithmetic must not be rounded to 16 bits."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not on:  # asked for several times a layer
        return _NOTHING
    stack = ExitStack()
    for device in on:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def accumulating_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 where any of the tensors is fp64, else fp32: what sums are taken in and, unless asked otherwise, returned
    in."""
    for t in tensors:
        if t.dtype is torch.float64:
            return torch.float64
    return torch.float32


def towards_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, no entry larger than it was: what a clip factor is rounded with, subnormal ones included."""
    if x.dtype.itemsize <= dtype.itemsize:
        return x.to(dtype)
    rounded = x.to(dtype)
    return torch.where(rounded.to(x.dtype).abs() > x.abs(), rounded.nextafter(rounded.new_zeros(())), rounded)


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of the dtype that accumulates."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def smallest_normal(dtype: torch.dtype) -> float:
    """The error of one operation that underflows, hardware that flushes subnormals to zero included."""
    return 2.0**-1022 if dtype == torch.float64 else 2.0**-126
