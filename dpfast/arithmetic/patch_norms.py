"""The Gram way for convolutions of stride 1 without their patches: ``a_t·a_t' = Σ_k x_{t+k}·x_{t'+k}``, so the Gram
matrix of the patches is a sum of windows of that of the pixels, which has a kernel's fewer FLOPs and copies nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfast.arithmetic import cost, reference
from dpfast.arithmetic.precision import accumulating_dtype, exact_arithmetic
from dpfast.arithmetic.reference_norms import gram_from_tiles, gram_part, gram_tile
from dpfast.arithmetic.stacked_grams import UnfinishedGram


def unfinished_gram_of_patches(
    image: Tensor, rows: Tensor, kernel: Sequence[int], dilation: Sequence[int]
) -> UnfinishedGram:
    """What ‖Σ_t b_t a_tᵀ‖² follows from, for the patches a_t of an image.

    Args:
        image: (N, C, *spatial), with its zeros around it.
        rows: (N, P, *positions), one for each place of the kernel in the image.
    """
    dtype = accumulating_dtype(image, rows)
    n, channels, *sizes = image.shape
    positions, places = rows.shape[2:], math.prod(kernel)
    t, p = positions.numel(), rows.shape[1]
    windows, every = list(_windows(kernel, dilation, positions)), (slice(None),)
    pixels, b = image.to(dtype).flatten(2), rows.to(dtype).flatten(2)
    missing, more = (cost.gram_positions(x.shape[2]) - x.shape[2] for x in (b, pixels))
    b = (F.pad(b, (0, missing)) if missing else b).mT
    pixels = (F.pad(pixels, (0, more)) if more else pixels).mT

    whole: dict[int, Tensor] = {}

    def of_patches(samples: slice, r: slice, c: slice) -> Tensor:
        if samples.start not in whole:
            whole.clear()
            gram = gram_tile(gram_part(pixels, samples))[:, : math.prod(sizes), : math.prod(sizes)]
            gram = gram.unflatten(2, sizes).unflatten(1, sizes)
            total = _added(gram, [every + window + window for window in windows]).view(-1, t, t)
            whole[samples.start] = F.pad(total, (0, missing, 0, missing)) if missing else total
        tiles = whole[samples.start]
        return whole.pop(samples.start) if r.stop >= tiles.shape[1] and r.start == 0 else tiles[:, r, c].clone()

    def of_rows(samples: slice, r: slice, c: slice) -> Tensor:
        return gram_tile(gram_part(b, samples, r), None if r == c else gram_part(b, samples, c))

    with exact_arithmetic():
        return gram_from_tiles(
            of_patches,
            of_rows,
            (n, t + missing, channels * places, p),
            like=pixels,
            together=max(1, reference.WORKSPACE_BYTES // (dtype.itemsize * pixels.shape[1] ** 2)),
            added=places,
        )


def _added(x: Tensor, windows: Sequence[tuple[slice, ...]]) -> Tensor:
    """One after the other: the order of torch's own sum depends on how many samples there are."""
    total = x[windows[0]].clone(memory_format=torch.contiguous_format)
    for window in windows[1:]:
        total.add_(x[window])
    return total


def _windows(kernel: Sequence[int], dilation: Sequence[int], positions: torch.Size) -> Iterator[tuple[slice, ...]]:
    """What each place of the kernel sees."""
    starts = itertools.product(*(range(0, k * d, d) for k, d in zip(kernel, dilation, strict=True)))
    return (tuple(slice(i, i + size) for i, size in zip(start, positions, strict=True)) for start in starts)
