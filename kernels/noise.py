"""Gaussian noise, drawn where it is added.

    x[i] ← share · x[i] + std · z[i],   z[i] independent, normal

The numbers are in no memory: a program makes those of its entries out of their places and of two numbers on the device,
by Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011), which torch's own draws are made
by. One of the two is its key, the other half of its counter; the other half is lane and block, so that no two entries
have one, as long as no two blocks have one number. The kernel reads the two, not the host: a CUDA graph in which torch
draws them has other ones, and so other noise, with each replay.
Tiling: a program has four runs of LANES entries, one for each of the 32 bits that a counter gives.
Normal numbers: Box and Muller. u = (k + ½)·2⁻³² of the 32 bits k, as torch takes it, so that the tails end at 6.7; the
angle has 30 bits of an eighth of a turn to either side of an axis, the other two say which axis. Sine and cosine are
polynomials on it (Cephes; below 10⁻⁷).
Everything is fp32; a result is rounded once, to x's dtype.
Reference: `share * x.double() + std * z` of the same bits, in fp64. No input is written to but x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import launch
from ._tiles import Tile, cdiv

_TILE = Tile(0, 1024, 0, 0, 4, 1, "from static analysis: 32 entries a thread, loads of 16 bytes of 16-bit sums")


@triton.jit
def _normal(k, y):
    """Two normal numbers of two times 32 bits."""
    u = k.to(tl.float32) * 2.0**-32 + 2.0**-33
    # What approximates a logarithm may have it above 0 for a u next to 1.
    radius = tl.sqrt(tl.maximum(tl.log(u) * -2.0, 0.0))
    angle = (y << 2).to(tl.int32, bitcast=True).to(tl.float32) * (0.7853981633974483 * 2.0**-31)
    q = angle * angle
    sine = angle + angle * q * (-1.6666654611e-1 + q * (8.3321608736e-3 - q * 1.9515295891e-4))
    cosine = 1.0 - 0.5 * q + q * q * (4.166664568298827e-2 + q * (-1.388731625493765e-3 + q * 2.443315711809948e-5))
    cosine = tl.where(y >= 0x80000000, -cosine, cosine)
    turned = (y & 0x40000000) != 0
    return radius * tl.where(turned, sine, cosine), radius * tl.where(turned, cosine, sine)


@triton.jit
def _add(x_ptr, offs, z, size, std, share):
    mask = offs < size
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + offs, tl.fma(x, share, z * std).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first"])
def _add_noise_kernel(
    x_ptr,  # (size,)
    seeds_ptr,  # (2,)
    size,
    first,
    std,
    share,
    LANES: tl.constexpr,
):
    pid = tl.program_id(0)
    key = tl.load(seeds_ptr)
    counter = tl.load(seeds_ptr + 1)
    lane = tl.arange(0, LANES)
    block = tl.zeros((LANES,), tl.uint32) + (first + pid).to(tl.uint32)
    low = tl.zeros((LANES,), tl.uint32) + (counter & 0xFFFFFFFF).to(tl.uint32)
    high = tl.zeros((LANES,), tl.uint32) + ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(key, lane.to(tl.uint32), block, low, high)
    offs = pid.to(tl.int64) * (4 * LANES) + lane
    z, other = _normal(a, b)
    _add(x_ptr, offs, z, size, std, share)
    _add(x_ptr, offs + LANES, other, size, std, share)
    z, other = _normal(c, d)
    _add(x_ptr, offs + 2 * LANES, z, size, std, share)
    _add(x_ptr, offs + 3 * LANES, other, size, std, share)


def add_noise(x: torch.Tensor, seeds: torch.Tensor, std: float, *, share: float = 1.0, first: int = 0) -> int:
    """Multiplies a tensor and adds Gaussian noise to it, in place.

    Maths: x[i] ← share·x[i] + std·z[i].
    Args:
        x: any shape, contiguous, bf16, fp16 or fp32.
        seeds: (2,) int64 on x's device, drawn anew for each set of blocks.
        first: the number of its first block; a tensor has cdiv(x.numel(), 4096), and of tensors with the same seeds no
            two may have a block of one number.
    Returns: the number of the next tensor's first block.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: fp32, rounded once. The bits follow from seeds, numbers of blocks and places alone.
    Cost: x is read and written once.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not x.is_contiguous():
        raise ValueError(f"noise is added to contiguous bfloat16, float16 and float32, not {x.dtype} {x.stride()}")
    if seeds.shape != (2,) or seeds.dtype != torch.int64 or seeds.device != x.device or not seeds.is_contiguous():
        raise ValueError(f"seeds are (2,) int64 on x's device, not {tuple(seeds.shape)} {seeds.dtype} {seeds.device}")
    blocks = cdiv(x.numel(), 4 * _TILE.BLOCK_D)
    if not 0 <= first <= 2**32 - blocks:
        raise ValueError(f"blocks have numbers of 32 bits, not {first} to {first + blocks}")
    if blocks:
        launch(
            _add_noise_kernel,
            blocks,
            _TILE,
            x.device,
            x_ptr=x,
            seeds_ptr=seeds,
            size=x.numel(),
            first=first,
            std=float(std),
            share=float(share),
            LANES=_TILE.BLOCK_D,
        )
    return first + blocks
