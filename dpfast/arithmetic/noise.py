"""Gaussian noise on one tensor after the other, in place: by the kernel, which has no number in memory, or drawn by
torch and then added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dpfast.arithmetic.backends import choose_backend
from dpfast.arithmetic.kernel_norms import import_kernels


def noise_way(like: Tensor) -> str:
    """ "triton" or "reference": from one generator, what draws has numbers of its own."""
    return "reference" if like.dtype == torch.float64 else choose_backend("auto", like.device, like.dtype)


class Noise:
    """Independent numbers for tensors of one dtype and device, to each of which it is given once.

    Numbers are fp32 for 16-bit tensors, too, and what comes out is rounded once: rounded by themselves they would be
    few and far apart, and what they leave of a sum's own grid would tell it. No number is read by the host: captured in
    a CUDA graph, each replay draws anew.

    Args:
        like: one of the tensors.
        std: standard deviation of what is added.
        share: what the tensors are multiplied by.
        generator: torch's, on their device.
        first: the number of the first block. Blocks are counted on from device to device: default generators of several
            GPUs begin alike.

    Attributes:
        next: the number of the next block.
    """

    def __init__(self, like: Tensor, std: float, share: float, generator: Any, first: int):
        self._std, self._share, self._generator = std, share, generator
        self._seeds: Tensor | None = None
        self.next = first
        if noise_way(like) == "triton":
            self._seeds = torch.empty(2, dtype=torch.int64, device=like.device).random_(generator=generator)

    def add_to(self, x: Tensor) -> None:
        """``x ← share · x + noise``"""
        if self._seeds is not None and x.is_contiguous():
            add_noise = import_kernels()[0].add_noise
            self.next = add_noise(x, self._seeds, self._std, share=self._share, first=self.next)
            increment_version(x)  # who has noted what x holds is to see that it holds something else
            return
        dtype = torch.promote_types(x.dtype, torch.float32)
        noise = torch.empty(x.shape, dtype=dtype, device=x.device).normal_(0.0, self._std, generator=self._generator)
        torch.add(noise, x, alpha=self._share, out=x)
