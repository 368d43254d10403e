"""Per-sample gradients of a linear layer, with their norms and the bias's in the same pass.

    G[n] = s Σ_t b[n, t] a[n, t]ᵀ     (P, D)
    g[n] = s Σ_t b[n, t]              (P,)

Tiling: one program a tile of BLOCK_P × BLOCK_D of one sample's G, the tiles of a sample next to each other
so that its rows stay in the L2 cache. A program walks T in steps of BLOCK_T; each step is one `tl.dot` that
adds to the same fp32 accumulator. With a bias, BLOCK_P-wide column sums follow as further programs of the
sample, so that no tile of G waits for them.
Order of addition: T / BLOCK_T dots in sequence, each of BLOCK_T products in the hardware's order, then one
product with the scale s. A tile's squares are summed over D, then over P; tiles are summed in fp64 (`_partials`).
Reference: `einsum("ntp,ntd->npd", b, a)`. Source: Goodfellow, Efficient per-example gradient computations
(2015), written out instead of its norm alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import arch_of, launch, promote, validate, widens
from ._partials import sum_partials, sum_tile


@triton.jit
def outer_tile(
    b_ptr,  # one sample's (T, P)
    a_ptr,  # one sample's (T, D)
    stride_bt,
    stride_at,
    offs_p,
    offs_d,
    T,
    D,
    P,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One tile of G in fp32, zero outside (P, D)."""
    offs_t = tl.arange(0, BLOCK_T).to(tl.int64)
    mask_p = offs_p < P
    mask_d = offs_d < D
    b_ptrs = b_ptr + offs_t[:, None] * stride_bt + offs_p[None, :]
    a_ptrs = a_ptr + offs_t[:, None] * stride_at + offs_d[None, :]
    # In int64 before the product: a row stride may be as long as the whole batch.
    block = tl.full((), BLOCK_T, tl.int64)
    step_b = block * stride_bt
    step_a = block * stride_at

    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_T):
        mask_t = offs_t < T - start
        b = tl.load(b_ptrs, mask=mask_t[:, None] & mask_p[None, :], other=0.0)  # (BLOCK_T, BLOCK_P)
        a = tl.load(a_ptrs, mask=mask_t[:, None] & mask_d[None, :], other=0.0)  # (BLOCK_T, BLOCK_D)
        if WIDEN:
            b = b.to(tl.float32)
            a = a.to(tl.float32)
        # G += bᵀ a
        acc = tl.dot(tl.trans(b), a, acc, input_precision="ieee")
        b_ptrs += step_b
        a_ptrs += step_a
    return acc


@triton.jit
def column_sums(
    b_ptr,  # one sample's (T, P)
    stride_bt,
    offs_p,
    T,
    P,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Σ_t b[t] of one block of columns in fp32, zero outside P: T / BLOCK_T additions, then the block's."""
    offs_t = tl.arange(0, BLOCK_T).to(tl.int64)
    mask_p = offs_p < P
    acc = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for start in range(0, T, BLOCK_T):
        offs_row = start + offs_t
        b_ptrs = b_ptr + offs_row[:, None] * stride_bt + offs_p[None, :]
        acc += tl.load(b_ptrs, mask=(offs_row < T)[:, None] & mask_p[None, :], other=0.0).to(tl.float32)
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["T"])
def _outer_product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,  # (N, P)
    partials_ptr,
    stride_an,  # activations (N, T, D)
    stride_at,
    stride_bn,  # backprops (N, T, P)
    stride_bt,
    stride_gn,  # grad_sample (N, P, D)
    stride_gp,
    stride_sn,  # partial squared norms (N, programs of a sample)
    T,
    D,
    P,
    scale,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # locate
    tiles_d = tl.cdiv(D, BLOCK_D)
    tiles = tl.cdiv(P, BLOCK_P) * tiles_d
    programs = tiles
    if BIAS:
        programs += tl.cdiv(P, BLOCK_P)
    pid = tl.program_id(0)
    pid_n = (pid // programs).to(tl.int64)
    pid_tile = pid % programs
    b_ptr += pid_n * stride_bn
    a_ptr += pid_n * stride_an

    if pid_tile < tiles:
        offs_p = (pid_tile // tiles_d).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        offs_d = (pid_tile % tiles_d).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
        acc = outer_tile(b_ptr, a_ptr, stride_bt, stride_at, offs_p, offs_d, T, D, P, WIDEN, BLOCK_T, BLOCK_D, BLOCK_P)
        acc *= scale
        out_ptrs = out_ptr + pid_n * stride_gn + offs_p[:, None] * stride_gp + offs_d[None, :]
        mask = (offs_p < P)[:, None] & (offs_d < D)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
        if NORM:
            tl.store(partials_ptr + pid_n * stride_sn + pid_tile, sum_tile(acc * acc))
    elif BIAS:
        offs_p = (pid_tile - tiles).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        sums = column_sums(b_ptr, stride_bt, offs_p, T, P, BLOCK_T, BLOCK_P) * scale
        tl.store(bias_ptr + pid_n * P + offs_p, sums.to(bias_ptr.dtype.element_ty), mask=offs_p < P)
        if NORM:
            tl.store(partials_ptr + pid_n * stride_sn + pid_tile, tl.sum(sums * sums, axis=0))


class OuterProductResult(NamedTuple):
    grad_sample: torch.Tensor
    bias_grad_sample: torch.Tensor | None
    sq_norm: torch.Tensor | None
    bias_sq_norm: torch.Tensor | None


def outer_product(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    *,
    bias: bool = False,
    norm: bool = False,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
    tile: _tiles.Tile | None = None,
) -> OuterProductResult:
    """Per-sample gradients of a linear layer.

    Maths: grad_sample[n] = s Σ_t b[n, t] a[n, t]ᵀ, bias_grad_sample[n] = s Σ_t b[n, t].
    Args:
        activations: (N, T, D), bf16, fp16 or fp32, unit last stride.
        backprops: (N, T, P), likewise; a mixed pair is copied to fp32 first.
        bias: also return the bias's gradients.
        norm: also return squared norms, taken before rounding to `out_dtype`.
        scale: s, applied to the fp32 sums; N where the loss was a mean over samples.
        tile: instead of the table's.
    Returns: grad_sample (N, P, D) and bias_grad_sample (N, P) in `out_dtype`, sq_norm and bias_sq_norm (N,)
        fp32; None where not asked for. All fresh.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: fp32 accumulation, one rounding to `out_dtype`; IEEE products of fp32.
    Cost: 2·N·T·D·P FLOPs; writes N·P·D.
    Edge cases: N = 0 is empty; T = 0 gives zeros.
    """
    validate(activations, backprops)
    activations, backprops = promote(activations, backprops)
    N, T, D = activations.shape
    P = backprops.shape[2]
    device = activations.device
    if 0 in (N, T, D, P):
        # An empty sum, or nothing to sum into: D = 0 leaves the bias its value.
        sums = backprops.sum(1, dtype=torch.float32) * scale if bias else None
        return OuterProductResult(
            torch.zeros((N, P, D), dtype=out_dtype, device=device),
            sums.to(out_dtype) if bias else None,
            torch.zeros(N, dtype=torch.float32, device=device) if norm else None,
            sums.square().sum(1) if bias and norm else None,
        )
    if tile is None:
        tile = _tiles.tile("outer_product", T, D, P, activations.dtype, arch_of(activations))
    tiles_p = triton.cdiv(P, tile.BLOCK_P)
    tiles = tiles_p * triton.cdiv(D, tile.BLOCK_D)
    programs = tiles + (tiles_p if bias else 0)
    out = torch.empty((N, P, D), dtype=out_dtype, device=device)
    bias_out = torch.empty((N, P), dtype=out_dtype, device=device) if bias else None
    partials = torch.empty((N, programs), dtype=torch.float32, device=device) if norm else None
    launch(
        _outer_product_kernel,
        N * programs,
        tile,
        device,
        a_ptr=activations,
        b_ptr=backprops,
        out_ptr=out,
        bias_ptr=bias_out,
        partials_ptr=partials,
        stride_an=activations.stride(0),
        stride_at=activations.stride(1),
        stride_bn=backprops.stride(0),
        stride_bt=backprops.stride(1),
        stride_gn=out.stride(0),
        stride_gp=out.stride(1),
        stride_sn=programs,
        T=T,
        D=D,
        P=P,
        scale=float(scale),
        BIAS=bias,
        NORM=norm,
        WIDEN=widens(_outer_product_kernel),
        BLOCK_T=tile.BLOCK_T,
        BLOCK_D=tile.BLOCK_D,
        BLOCK_P=tile.BLOCK_P,
    )
    sums = sum_partials(partials, tiles) if norm else (None,)
    return OuterProductResult(out, bias_out, sums[0], sums[1] if bias and norm else None)
