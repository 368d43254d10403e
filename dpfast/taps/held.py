"""A layer's output, held for the layer's rule where that has a use for it: a second reference, nothing is copied."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import is_traced, reduced_convolutions, reduced_products
from dpfast.taps.passes import in_backward, saves_as_torch_does

_keeps_graph: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


class Held:
    """What one forward pass of a layer gave.

    Not through autograd's saved tensors: a write in place behind the layer, which is no error of the model's, would
    become one. So nothing is held where somebody else decides what is kept (checkpoints, offloading).
    """

    def __init__(self) -> None:
        self._held: tuple[Tensor, int, Tensor, Tensor] | None = None

    def hold(self, output: Tensor, made_of: Tensor) -> None:
        """Holds the output, if it is known to be of fp32's or fp64's precision."""
        plain = type(output) is Tensor and output.device.type == "cpu" and output.dtype == made_of.dtype
        plain = plain and output.dtype in (torch.float32, torch.float64) and output.numel() > 0
        exact = not reduced_convolutions() and reduced_products() == 0.0
        here = not is_traced() and in_backward() is None and _keeps_graph is not None
        if plain and exact and here and saves_as_torch_does():
            self._held = output.detach(), output._version, _seal(output), made_of.detach()

    def take(self, made_of: Tensor) -> Tensor | None:
        """The output, unless it has been written to since, or is of other rows than these."""
        if self._held is None:
            return None
        output, version, seal, before = self._held
        if not _keeps_graph():
            self._held = None
        same = (made_of.data_ptr(), made_of.shape, made_of.stride()) == (
            before.data_ptr(),
            before.shape,
            before.stride(),
        )
        untouched = output._version == version and torch.equal(_seal(output), seal)
        return output if same and untouched else None


def _seal(x: Tensor) -> Tensor:
    """Numbers, as bits, by which a write is seen that torch does not count (``.data``): a norm rests on it. Each is of
    a part of one sample, so what is not finite hides no other's, and weighs every place differently."""
    width = _width(x.numel() // x.shape[0])
    parts = torch.mv(x.detach().reshape(-1, width), _weights(width, x.dtype))
    return parts.view(torch.int64 if x.dtype is torch.float64 else torch.int32)


_PART = 512
"""Entries that one number is of, at most."""


@lru_cache(maxsize=1024)
def _width(entries: int) -> int:
    return next(some for some in range(_PART, 0, -1) if entries % some == 0)


@lru_cache(maxsize=64)
def _weights(width: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(width), dtype=dtype, device="cpu") + 0.5
