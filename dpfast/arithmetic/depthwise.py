"""Weight gradients of depthwise convolutions, a sample's own, as products of matrices of which only diagonals are used.

``G[c, i, j] = Σ_hw rows[c, h, w] · image[c, h·s + i·d, w·s + j·d]``. For one i, cut w into blocks of b: the product of
the blocks of rows, (b, h and blocks), with the pieces of image that they reach, (h and blocks, window), has in row w
the products with all of the window, and the sums along its diagonals are G[c, i, :]. That is window/k times as many
multiply-adds as are needed, but they are a GEMM's: on a CPU 2 to 4 times as fast as oneDNN's own weight gradient,
which is fast for three places in a row alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfast.arithmetic import bounds, products

_AT_ONCE = 2**20
"""Bytes of products of several samples that are made at a time: they stay in the cache. A sample's bits do not depend
on its company."""

_WORTH_IT = 2**12
"""Multiply-adds of one channel from which products are faster (7×7 places: as fast at 7×7 positions, 2.5 times at
14×14; AMD EPYC, as it is and with AVX2 alone)."""


def faster(positions: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether products take less time on a CPU than torch's convolution."""
    by_onednn = kernel[-1] <= 3 and (dilation[-1] == 1 or kernel[-1] == 1)
    return not by_onednn and torch.Size(positions).numel() * torch.Size(kernel).numel() >= _WORTH_IT


def chain(positions: Sequence[int]) -> int:
    """The longest chain of additions in :func:`gradients`."""
    blocks, block = _blocks(positions[-1])
    return bounds.blocked_terms(torch.Size(positions[:-1]).numel() * blocks, bounds.CHAIN_BLOCK) + block


def gradients(
    image: Tensor, rows: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The gradients (n, C, 1, *kernel).

    Args:
        image: (n, C, *spatial), as far as patches reach, fp32 or fp64.
        rows: (n, C, *positions), of the same dtype.
    """
    blocks, block = _blocks(rows.shape[-1])
    window = (block - 1) * stride[-1] + dilation[-1] * (kernel[-1] - 1) + 1
    image = F.pad(image, (0, (blocks - 1) * block * stride[-1] + window - image.shape[-1]))
    rows = F.pad(rows, (0, blocks * block - rows.shape[-1])).contiguous()
    samples = max(1, _AT_ONCE // max(1, rows.shape[1] * block * window * rows.element_size()))
    parts = [
        _of_block(x, b.unflatten(-1, (blocks, block)), window, kernel, stride, dilation)
        for x, b in zip(image.split(samples), rows.split(samples), strict=True)
    ]
    return torch.cat(parts).view(*rows.shape[:2], 1, *kernel)


def _blocks(width: int) -> tuple[int, int]:
    """How many blocks of how many positions: of 16 at least, because products of fewer rows depend on the batch."""
    most = max(1, width // products.BATCH_INVARIANT_FROM)
    blocks = next((n for n in range(most, 0, -1) if width % n == 0 and width // n <= 32), most)
    return blocks, max(products.BATCH_INVARIANT_FROM, -(-width // blocks))


def _of_block(
    image: Tensor,
    rows: Tensor,
    window: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """(n·C, places) from rows (n, C, ..., blocks, block)."""
    block, positions = rows.shape[-1], rows.shape[2:-2]
    windows = image.unfold(-1, window, block * stride[-1]).contiguous()
    rows = rows.reshape(rows.shape[0] * rows.shape[1], -1, block).mT
    found = []
    for offsets in itertools.product(*(range(k) for k in kernel[:-1])):
        reached = windows
        for i, (offset, size) in enumerate(zip(offsets, positions, strict=True)):
            first, step = offset * dilation[i], stride[i]
            reached = reached.narrow(2 + i, first, (size - 1) * step + 1)
            if step > 1:
                reached = reached[(slice(None),) * (2 + i) + (slice(None, None, step),)]
        reached = reached.reshape(rows.shape[0], rows.shape[2], window)
        x, *others_x = rows.split(bounds.CHAIN_BLOCK, 2)
        y, *others_y = reached.split(bounds.CHAIN_BLOCK, 1)
        product = products.batched(x, y)
        for x, y in zip(others_x, others_y, strict=True):
            products.batched(x, y, add_to=product)
        found.append(_diagonals(product, kernel[-1], stride[-1], dilation[-1]))
    return torch.stack(found, dim=1)


def _diagonals(product: Tensor, places: int, stride: int, dilation: int) -> Tensor:
    """``Σ_w product[:, w, w·stride + j·dilation]`` for each j, (m, places)."""
    batch, row, column = product.stride()
    steps = (batch, dilation * column, row + stride * column)
    return product.as_strided((product.shape[0], places, product.shape[1]), steps).sum(-1)
