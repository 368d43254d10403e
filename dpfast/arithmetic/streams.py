"""Which queue of a GPU work goes to, and whether it is captured there."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def stream_here(device: torch.device) -> Hashable:
    """What equals where work on the device goes to the same stream. Unlike torch's streams it can be copied: a tap that
    keeps it is copied for every look at its model."""
    return (device, _raw_stream(device.index)) if device.type == "cuda" else device


def _raw_stream(index: int) -> int:
    """Its address, without an object of torch's, which takes ten times as long; this is how Triton asks, too."""
    return int(torch._C._cuda_getCurrentRawStream(index))  # only a build for GPUs has it


def in_cuda_graph() -> bool:
    """Whether what is called here is captured, so that nobody can wait for it or read what it gives."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
