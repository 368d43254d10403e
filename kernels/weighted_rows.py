"""Sums of rows, with weights or without.

    out[b, k] = Σ_j c[j] x[b, j, k]   or   Σ_j x[b, j, k]

What a step makes of gradients that it has kept, and of the parts that another kernel has left. A row whose weight is
0 is not read, so it adds exactly nothing whatever it holds. Tiling: BLOCK_K entries of one b a program, which walks all
rows, BLOCK_J at a time, one fp32 accumulator an entry and row of the block; then the block's rows are added. The order
is fixed by J alone. Each element is read once.
Reference: `torch.einsum("j,bjk->bk", c.double(), x.double())`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ._launch import launch
from ._repeat import empty, repeats
from ._tiles import Tile, cdiv, next_power_of_2

_ROWS, _ENTRIES = 16, 2048  # rows of a block, and its entries: 16 a thread of four warps


@triton.jit(do_not_specialize=["J"])
def _weighted_rows_kernel(
    x_ptr,  # (B, J, K), the last two contiguous
    c_ptr,  # None, or (J,)
    out_ptr,  # (B, K)
    stride_xb,
    stride_c,
    J,
    K,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    pid_b = (pid // blocks).to(tl.int64)
    offs_k = pid % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    x_ptr += pid_b * stride_xb
    acc = tl.zeros((BLOCK_J, BLOCK_K), tl.float32)
    for start in range(0, J, BLOCK_J):
        offs_j = start + tl.arange(0, BLOCK_J)
        read = offs_j < J
        if c_ptr is not None:
            c = tl.load(c_ptr + offs_j * stride_c, mask=read, other=0.0)
            read = read & (c != 0.0)
        x = tl.load(
            x_ptr + offs_j.to(tl.int64)[:, None] * K + offs_k[None, :], mask=read[:, None] & mask_k[None, :], other=0.0
        )
        if c_ptr is not None:
            acc += c[:, None] * x
        else:
            acc += x
    tl.store(out_ptr + pid_b * K + offs_k, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=mask_k)


@repeats
def weighted_rows(
    x: torch.Tensor, weights: torch.Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Sums of rows.

    Maths: out[b, k] = Σ_j weights[j] x[b, j, k].
    Args:
        x: (B, J, K) fp32, the last two dims contiguous.
        weights: (J,) fp32 of any stride; 1 unless given.
        out_dtype: of the sums, which are rounded to it once, to nearest.
    Returns: (B, K) in `out_dtype`, fresh.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: fp32, in an order that J fixes. A row with weight 0 adds exactly nothing, whatever it holds.
    Cost: x is read once.
    Edge cases: J = 0 gives zeros.
    """
    if x.dim() != 3 or x.dtype != torch.float32:
        raise ValueError(f"rows are (B, J, K) float32, not {tuple(x.shape)} {x.dtype}")
    B, J, K = x.shape
    if x.numel() and ((K > 1 and x.stride(2) != 1) or (J > 1 and x.stride(1) != K)):
        raise ValueError(f"the last two dims must be contiguous, not of strides {x.stride()[1:]}")
    if weights is not None and (weights.shape != (J,) or weights.dtype != torch.float32 or weights.device != x.device):
        raise ValueError(f"weights are ({J},) float32 on {x.device}, not {tuple(weights.shape)} {weights.dtype}")
    if x.numel() == 0:
        return torch.zeros((B, K), dtype=out_dtype, device=x.device)
    out = empty((B, K), out_dtype, x.device)
    tile = _tile(J)
    launch(
        _weighted_rows_kernel,
        B * cdiv(K, tile.BLOCK_K),
        tile,
        x.device,
        x_ptr=x,
        c_ptr=weights,
        out_ptr=out,
        stride_xb=x.stride(0),
        stride_c=0 if weights is None else weights.stride(0),
        J=J,
        K=K,
        BLOCK_J=tile.BLOCK_T,
        BLOCK_K=tile.BLOCK_K,
    )
    return out


@lru_cache(maxsize=256)
def _tile(J: int) -> Tile:
    """Few rows leave room for longer pieces of them."""
    rows = min(_ROWS, next_power_of_2(J))
    return Tile(rows, 0, 0, _ENTRIES // rows, 4, 1, "from static analysis: 16 entries a thread, loads of 16 bytes")
