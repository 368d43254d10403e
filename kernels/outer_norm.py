"""Direct norm: squared norms of per-sample gradients that are never written.

    ‖G[n]‖² = ‖Σ_t b[n, t] a[n, t]ᵀ‖²
    ‖g[n]‖² = ‖Σ_t b[n, t]‖²

Tiling and order of addition: those of `outer_product`, whose tile this kernel squares in registers. One
fp32 a tile is written.
Reference: `einsum("ntp,ntd->npd", b, a).square().sum((1, 2))`. Source: Li et al., Large language models can
be strong differentially private learners (2022), §4, for when T is long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import arch_of, launch, promote, validate, widens
from ._partials import sum_partials, sum_tile
from .outer_product import column_sums, outer_tile


@triton.jit(do_not_specialize=["T"])
def _outer_norm_kernel(
    a_ptr,
    b_ptr,
    partials_ptr,
    stride_an,  # activations (N, T, D)
    stride_at,
    stride_bn,  # backprops (N, T, P)
    stride_bt,
    stride_sn,  # partial squared norms (N, programs of a sample)
    T,
    D,
    P,
    BIAS: tl.constexpr,
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
    partial_ptr = partials_ptr + pid_n * stride_sn + pid_tile

    if pid_tile < tiles:
        offs_p = (pid_tile // tiles_d).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        offs_d = (pid_tile % tiles_d).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
        acc = outer_tile(b_ptr, a_ptr, stride_bt, stride_at, offs_p, offs_d, T, D, P, WIDEN, BLOCK_T, BLOCK_D, BLOCK_P)
        tl.store(partial_ptr, sum_tile(acc * acc))
    elif BIAS:
        offs_p = (pid_tile - tiles).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        sums = column_sums(b_ptr, stride_bt, offs_p, T, P, BLOCK_T, BLOCK_P)
        tl.store(partial_ptr, tl.sum(sums * sums, axis=0))


class OuterNormResult(NamedTuple):
    sq_norm: torch.Tensor
    bias_sq_norm: torch.Tensor | None


def outer_norm(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    *,
    bias: bool = False,
    tile: _tiles.Tile | None = None,
) -> OuterNormResult:
    """Squared norms of a linear layer's per-sample gradients, taken directly.

    Maths: sq_norm[n] = ‖Σ_t b[n, t] a[n, t]ᵀ‖², bias_sq_norm[n] = ‖Σ_t b[n, t]‖².
    Args:
        activations: (N, T, D), bf16, fp16 or fp32, unit last stride.
        backprops: (N, T, P), likewise; a mixed pair is copied to fp32 first.
        bias: also return the bias's.
        tile: instead of the table's.
    Returns: (N,) fp32 each, fresh; None where not asked for.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: the gradient in fp32, its squares in fp32 within a tile, tiles in fp64.
    Cost: 2·N·T·D·P FLOPs; workspace 4 bytes a tile and sample.
    Edge cases: N = 0 is empty; T = 0 gives zeros.
    """
    validate(activations, backprops)
    activations, backprops = promote(activations, backprops)
    N, T, D = activations.shape
    P = backprops.shape[2]
    device = activations.device
    if 0 in (N, T, D, P):
        # An empty sum, or nothing to sum into: D = 0 leaves the bias its value.
        zeros = torch.zeros(N, dtype=torch.float32, device=device)
        return OuterNormResult(zeros, backprops.sum(1, dtype=torch.float32).square().sum(1) if bias else None)
    if tile is None:
        tile = _tiles.tile("outer_norm", T, D, P, activations.dtype, arch_of(activations))
    tiles_p = triton.cdiv(P, tile.BLOCK_P)
    tiles = tiles_p * triton.cdiv(D, tile.BLOCK_D)
    programs = tiles + (tiles_p if bias else 0)
    partials = torch.empty((N, programs), dtype=torch.float32, device=device)
    launch(
        _outer_norm_kernel,
        N * programs,
        tile,
        device,
        a_ptr=activations,
        b_ptr=backprops,
        partials_ptr=partials,
        stride_an=activations.stride(0),
        stride_at=activations.stride(1),
        stride_bn=backprops.stride(0),
        stride_bt=backprops.stride(1),
        stride_sn=programs,
        T=T,
        D=D,
        P=P,
        BIAS=bias,
        WIDEN=widens(_outer_norm_kernel),
        BLOCK_T=tile.BLOCK_T,
        BLOCK_D=tile.BLOCK_D,
        BLOCK_P=tile.BLOCK_P,
    )
    sums = sum_partials(partials, tiles)
    return OuterNormResult(sums[0], sums[1] if bias else None)
