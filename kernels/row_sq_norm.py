"""Squared norm of every row, or its root.

    out[n, t] = Σ_d x[n, t, d]²

Tiling: the N·T rows are one list, BLOCK_T rows a program; a program walks its rows in blocks of BLOCK_D
features, reading each element once. One fp32 accumulator an element of the block: D / BLOCK_D fused
multiply-adds in sequence, then the block is summed over its features.
Reference: `x.double().square().sum(-1)`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import arch_of, launch, validate
from ._repeat import empty, repeats
from ._tiles import cdiv


@triton.jit(do_not_specialize=["rows", "T"])
def _row_sq_norm_kernel(
    x_ptr,
    out_ptr,  # (N, T)
    stride_xn,  # x (N, T, D)
    stride_xt,
    rows,
    T,
    D,
    lost,
    ROOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # locate
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_r = offs_r < rows
    offs_d = tl.arange(0, BLOCK_D)
    row_ptrs = x_ptr + (offs_r // T) * stride_xn + (offs_r % T) * stride_xt

    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        mask_d = start + offs_d < D
        x = tl.load(
            row_ptrs[:, None] + (start + offs_d)[None, :],
            mask=mask_r[:, None] & mask_d[None, :],
            other=0.0,
        ).to(tl.float32)  # (BLOCK_T, BLOCK_D)
        acc += x * x

    found = tl.sum(acc, axis=1)
    if ROOT:
        found = tl.sqrt(found + lost)
    tl.store(out_ptr + offs_r, found, mask=mask_r)


@repeats
def row_sq_norm(x: torch.Tensor) -> torch.Tensor:
    """Squared L2 norm of every row of `x`.

    Maths: out[n, t] = Σ_d x[n, t, d]².
    Args: x (N, T, D), bf16, fp16 or fp32, unit last stride.
    Returns: (N, T) fp32, fresh.
    Raises: ValueError where dtype or layout is none of the above.
    Cost: 2·N·T·D FLOPs; x is read once.
    """
    return _of_rows(x, root=False)


@repeats
def row_norm(x: torch.Tensor) -> torch.Tensor:
    """L2 norm of every row of `x`, no smaller for squares that underflow: for error bounds.

    Maths: out[n, t] = √(Σ_d x[n, t, d]² + D·2⁻¹²⁶).
    Args, Returns, Raises, Cost: as `row_sq_norm`.
    """
    return _of_rows(x, root=True)


def _of_rows(x: torch.Tensor, *, root: bool) -> torch.Tensor:
    validate(x)
    N, T, D = x.shape
    if x.numel() == 0:
        return torch.zeros((N, T), dtype=torch.float32, device=x.device)
    tile = _tiles.tile("row_sq_norm", T, D, 0, x.dtype, arch_of(x))
    out = empty((N, T), torch.float32, x.device)
    launch(
        _row_sq_norm_kernel,
        cdiv(N * T, tile.BLOCK_T),
        tile,
        x.device,
        x_ptr=x,
        out_ptr=out,
        stride_xn=x.stride(0),
        stride_xt=x.stride(1),
        rows=N * T,
        T=T,
        D=D,
        lost=D * 2.0**-126,
        ROOT=root,
        BLOCK_T=tile.BLOCK_T,
        BLOCK_D=tile.BLOCK_D,
    )
    return out
