"""How samples' gradients come out of torch's convolution, as far as sizes and dtypes tell: asked once for each kind."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from dpfast.arithmetic import bounds

TOGETHER = 16
"""Samples whose gradients one call of torch's convolution takes mostly, each a group of channels of its own. Fewer left
over are filled up to 2 or 4: a group has the same bits in calls of 2, 4 and 8 (the tests watch it), not in one of 1."""

CHAIN = 1024
"""Positions that such a call adds up, if a row of the image is no longer, before it starts a new partial sum."""

SHORT_CHAIN = 128
"""The same where there are few channels, and most positions: these are products of our own."""


class Ways(NamedTuple):
    """Of gradients of one shape, from rows of one size.

    Attributes:
        positions: of a row.
        is_pointwise: a patch is a pixel: a linear layer, whose products need no cutting out and no groups.
        is_narrow: there are few channels, of which torch's convolution would make 16, and patches are small.
        is_depthwise: each channel has its own patches and one row; on a CPU, in fp32.
        together: samples in a call, where gradients are not products one by one.
        block, blocks: positions along the first dimension that one call adds up, and how many calls that are.
        relative, least: how far the gradients may be off, relative to ``Σ_t |b_tp||a_td|`` and by underflow.
    """

    positions: int
    is_pointwise: bool
    is_narrow: bool
    is_depthwise: bool
    together: int
    block: int
    blocks: int
    relative: float
    least: float


@lru_cache(maxsize=4096)
def ways(shape: torch.Size, sizes: torch.Size, groups: int, dtype: torch.dtype, on_cpu: bool, exact: bool) -> Ways:
    """
    Args:
        shape: of a gradient, (P, D / groups, *kernel). sizes: of a row, (*positions).
        dtype: that accumulates. exact: no global switch lets products run in less than fp32.

    Numerics:
        Of depthwise kernels a call adds half as many positions, because the routine that they take adds up one after
        the other what the other adds in parts. One sample alone takes 0.6 of the time of several where gradients are
        large (128×128×3×3), and 0.5 where few channels have large patches (3 of 7×7; AMD EPYC).
    """
    kernel, positions = shape[2:].numel(), sizes.numel()
    is_pointwise = groups == 1 and kernel == 1 and exact
    is_narrow = groups == 1 and shape[1] <= 4 and shape[1:].numel() <= 64 and exact
    is_depthwise = groups > 1 and shape[:2] == (groups, 1) and on_cpu and dtype is torch.float32
    large = shape.numel() >= 2**17 or (shape[1] <= 4 and not is_narrow)
    rest = sizes[1:].numel()
    block = max(1, min(sizes[0], (CHAIN // 2 if is_depthwise else CHAIN) // max(1, rest)))
    blocks = -(-sizes[0] // block)
    chain = (bounds.blocked_terms(block * rest, SHORT_CHAIN) if is_narrow else block * rest) + blocks
    terms = bounds.chain_terms(terms=chain, numel=shape.numel(), dtype=dtype, operations=2 * positions)
    together = 1 if groups == 1 and large and not is_pointwise else TOGETHER
    return Ways(positions, is_pointwise, is_narrow, is_depthwise, together, block, blocks, *terms)
