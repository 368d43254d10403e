"""Weighted sum of per-sample gradients that are never written.

    W = Σ_n c[n] Σ_t b[n, t] a[n, t]ᵀ     (P, D)
    w = Σ_n c[n] Σ_t b[n, t]              (P,)

Rounding c·b to 16 bits would cost 2⁻⁹ of every product, so the factor is applied where it costs nothing:

- "per_sample" (long T): a sample's product is accumulated unweighted in fp32, one `tl.dot` a step of BLOCK_T
  positions, and `total += c[n] · acc` once a sample. Two fp32 accumulators; inputs go to the tensor cores as
  they are, through descriptors where strides allow.
- "flat" (short T, where that epilogue would cost as much as the dots and masked positions more): rows of
  several samples form one step, c·b is taken in fp32 and split into two bf16 parts, c·b = hi + lo + O(2⁻¹⁷),
  with one dot a part. fp16 activations split exactly into two bf16 parts (11 bits = 8 + 3), and the product
  of the low parts, up to 2⁻¹⁶, is dropped: three dots. fp32 needs no split. Always through pointers: a descriptor's
  block has one sample and no mask, and here a step has rows of several, some with factor 0.

Tiling: one program a BLOCK_P × BLOCK_D tile of W and part of the reduction; both layouts walk their part
in one loop, so that loads stay in flight from sample to sample. Parts are fp32 and are added by
`torch.sum` in a second stage: no atomics. With a bias, BLOCK_P-wide weighted column sums follow as further
programs. c[n] = 0 keeps the sample from being loaded: its NaN or inf are never read, and neither are its bytes; where
rows are copied first (`_tiles.row_step`), those of the copy.
Reference: `einsum("n,ntp,ntd->pd", c, b, a)` over samples with c[n] != 0. Source: Bu et al., Differentially
private optimization on large model at small cost (2023), the book-keeping step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import arch_of, launch, promote, validate, widens
from ._repeat import empty, repeats
from ._rows import brought_to_step, load_columns, load_rows, row_sources
from ._tiles import cdiv


@triton.jit
def _step_of(step, c_ptr, stride_cn, N, T, FLAT: tl.constexpr, BLOCK_T: tl.constexpr):
    """Samples, positions and factors of a step's rows; in "per_sample" scalars, the first position's for all.

    There a sample whose factor is 0 is read at position T: past its end, where a load reads no byte.
    """
    if FLAT:
        offs_r = step * BLOCK_T + tl.arange(0, BLOCK_T)
        n = (offs_r // T).to(tl.int64)
        c = tl.load(c_ptr + n * stride_cn, mask=offs_r < N * T, other=0.0)
        return n, (offs_r % T).to(tl.int64), c
    else:
        steps = tl.cdiv(T, BLOCK_T)
        n = step // steps
        c = tl.load(c_ptr + tl.cast(n, tl.int64) * stride_cn)
        return n, tl.where(c != 0.0, step % steps * BLOCK_T, T), c


@triton.jit
def _load_step(
    x,  # (N, T, F), see `load_rows`
    stride_n,
    stride_t,
    n,
    t,
    c,
    f,
    T,
    F,
    FLAT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """A step's rows of x, f : f + BLOCK_F of each: zero past the end and where the factor is 0."""
    if FLAT:
        offs_f = f + tl.arange(0, BLOCK_F)
        row_ptrs = x + n * stride_n + t * stride_t
        mask = (c != 0.0)[:, None] & (offs_f < F)[None, :]
        return tl.load(row_ptrs[:, None] + offs_f[None, :], mask=mask, other=0.0)
    else:
        return load_rows(x, stride_n, stride_t, n, t, f, T, F, TMA, BLOCK_T, BLOCK_F)


@triton.jit
def _load_step_columns(
    x,  # see `_load_step`
    stride_n,
    stride_t,
    n,
    t,
    c,
    f,
    T,
    F,
    FLAT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """The block of `_load_step`, transposed, for the reason `load_columns` gives."""
    if FLAT:
        offs_f = f + tl.arange(0, BLOCK_F)
        row_ptrs = x + n * stride_n + t * stride_t
        mask = (offs_f < F)[:, None] & (c != 0.0)[None, :]
        return tl.load(row_ptrs[None, :] + offs_f[:, None], mask=mask, other=0.0)
    else:
        return load_columns(x, stride_n, stride_t, n, t, f, T, F, TMA, BLOCK_T, BLOCK_F)


@triton.jit
def _weighted_column_sums(
    b,
    c_ptr,
    stride_bn,
    stride_bt,
    stride_cn,
    first,
    last,
    p,
    N,
    T,
    P,
    FLAT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Σ c·b over steps [first, last) of one block of columns in fp32, zero outside P."""
    acc = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for step in range(first, last):
        n, t, c = _step_of(step, c_ptr, stride_cn, N, T, FLAT, BLOCK_T)
        b_rows = _load_step(b, stride_bn, stride_bt, n, t, c, p, T, P, FLAT, TMA, BLOCK_T, BLOCK_P)
        acc += (c + tl.zeros((BLOCK_T,), tl.float32))[:, None] * b_rows.to(tl.float32)
    return tl.sum(acc, axis=0)


@triton.jit
def _to_bf16(x, WIDEN: tl.constexpr):
    """The bf16 nearest to x."""
    if WIDEN:
        # The interpreter of Triton 3.7.1 truncates, and its dot needs fp32: Veltkamp's rounding, kept in fp32.
        y = x * 65537.0
        return y - (y - x)
    return x.to(tl.bfloat16)


@triton.jit
def _weighted_tile(
    a,
    b,
    c_ptr,
    stride_an,
    stride_at,
    stride_bn,
    stride_bt,
    stride_cn,
    first,
    last,
    p,
    d,
    N,
    T,
    D,
    P,
    FLAT: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Steps [first, last) of a tile of W."""
    steps = tl.cdiv(T, BLOCK_T)
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for step in range(first, last):
        n, t, c = _step_of(step, c_ptr, stride_cn, N, T, FLAT, BLOCK_T)
        b_columns = _load_step_columns(b, stride_bn, stride_bt, n, t, c, p, T, P, FLAT, TMA, BLOCK_T, BLOCK_P)
        a_rows = _load_step(a, stride_an, stride_at, n, t, c, d, T, D, FLAT, TMA, BLOCK_T, BLOCK_D)
        if FLAT:
            # W += (c b)ᵀ a
            x = a_rows.to(tl.float32)
            cb = c[None, :] * b_columns.to(tl.float32)  # (BLOCK_P, BLOCK_T)
            if SPLIT:
                cb_hi = _to_bf16(cb, WIDEN)
                cb_lo = _to_bf16(cb - cb_hi.to(tl.float32), WIDEN)
                a_hi = _to_bf16(x, WIDEN)
                if a_rows.dtype == tl.float16:
                    a_lo = _to_bf16(x - a_hi.to(tl.float32), WIDEN)
                    acc = tl.dot(cb_hi, a_lo, acc, input_precision="ieee")
                acc = tl.dot(cb_lo, a_hi, acc, input_precision="ieee")
                acc = tl.dot(cb_hi, a_hi, acc, input_precision="ieee")
            else:
                acc = tl.dot(cb, x, acc, input_precision="ieee")
        else:
            if WIDEN:
                b_columns = b_columns.to(tl.float32)
                a_rows = a_rows.to(tl.float32)
            # G[n] += bᵀ a
            acc = tl.dot(b_columns, a_rows, acc, input_precision="ieee")
            if (step + 1) % steps == 0 or step == last - 1:
                # W += c G[n], or the share of G[n] that falls into this part
                total += c * acc
                acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    return acc if FLAT else total


@triton.jit(do_not_specialize=["N", "T", "steps_per_split", "steps"])
def _weighted_sum_kernel(
    a,  # activations (N, T, D), see `load_rows`
    b,  # backprops (N, T, P)
    c_ptr,  # clip_factor (N,)
    out_ptr,  # (splits, P, D)
    bias_ptr,  # (splits, P)
    stride_an,
    stride_at,
    stride_bn,
    stride_bt,
    stride_cn,
    N,
    T,
    D,
    P,
    steps,  # of the whole reduction
    steps_per_split,
    BIAS: tl.constexpr,
    FLAT: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,  # rows are read to the next multiple of it
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # locate: all tiles of a part, then its bias blocks, then the next part
    tiles_d = tl.cdiv(D, BLOCK_D)
    tiles = tl.cdiv(P, BLOCK_P) * tiles_d
    programs = tiles
    if BIAS:
        programs += tl.cdiv(P, BLOCK_P)
    pid = tl.program_id(0)
    pid_s = pid // programs
    pid_tile = pid % programs
    first = pid_s * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    read_d = tl.cdiv(D, STEP) * STEP
    read_p = tl.cdiv(P, STEP) * STEP

    if pid_tile < tiles:
        p = pid_tile // tiles_d * BLOCK_P
        d = pid_tile % tiles_d * BLOCK_D
        # fmt: off
        total = _weighted_tile(
            a, b, c_ptr, stride_an, stride_at, stride_bn, stride_bt, stride_cn, first, last, p, d, N, T, read_d, read_p,
            FLAT, SPLIT, TMA, WIDEN, BLOCK_T, BLOCK_D, BLOCK_P,
        )
        # fmt: on
        offs_p = p + tl.arange(0, BLOCK_P)
        offs_d = d + tl.arange(0, BLOCK_D)
        out_ptrs = out_ptr + pid_s.to(tl.int64) * P * D + offs_p.to(tl.int64)[:, None] * D + offs_d[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(offs_p < P)[:, None] & (offs_d < D)[None, :])
    elif BIAS:
        p = (pid_tile - tiles) * BLOCK_P
        # fmt: off
        sums = _weighted_column_sums(
            b, c_ptr, stride_bn, stride_bt, stride_cn, first, last, p, N, T, read_p, FLAT, TMA, BLOCK_T, BLOCK_P,
        )
        # fmt: on
        offs_p = p + tl.arange(0, BLOCK_P)
        tl.store(bias_ptr + pid_s.to(tl.int64) * P + offs_p, sums.to(bias_ptr.dtype.element_ty), mask=offs_p < P)


class WeightedSumResult(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


@repeats
def weighted_sum(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    clip_factor: torch.Tensor,
    *,
    bias: bool = False,
    out_dtype: torch.dtype = torch.float32,
    tile: _tiles.Tile | None = None,
) -> WeightedSumResult:
    """Weighted sum of a linear layer's per-sample gradients.

    Maths: weight = Σ_n c[n] Σ_t b[n, t] a[n, t]ᵀ, bias = Σ_n c[n] Σ_t b[n, t].
    Args:
        activations: (N, T, D), bf16, fp16 or fp32, unit last stride.
        backprops: (N, T, P), likewise; a mixed pair is copied to fp32 first.
        clip_factor: (N,) fp32 of any stride.
        bias: also return the bias's.
        out_dtype: of the sums, which are rounded to it once, to nearest.
        tile: instead of the table's.
    Returns: weight (P, D) and bias (P,), fresh; bias is None where not asked for.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: fp32 accumulation; see the module's docstring for where c is applied. Deterministic; the order
        of addition depends on the shapes (N among them) and the architecture.
    Cost: 2·N·T·D·P FLOPs in "per_sample", twice or (fp16) three times that in "flat"; workspace 4 bytes an
        element of W and part where the reduction is split.
    Edge cases: a sample with factor 0 adds exactly nothing, whatever it holds. N = 0 and T = 0 give zeros.
    """
    validate(activations, backprops)
    activations, backprops = promote(activations, backprops)
    N, T, D = activations.shape
    P = backprops.shape[2]
    device = activations.device
    if clip_factor.shape != (N,) or clip_factor.dtype != torch.float32:
        raise ValueError(f"clip_factor is (N,) float32, not {tuple(clip_factor.shape)} {clip_factor.dtype}")
    if 0 in (N, T, P):
        zeros = torch.zeros((P, D), dtype=out_dtype, device=device)
        return WeightedSumResult(zeros, zeros.new_zeros(P) if bias else None)
    dtype = activations.dtype
    arch = arch_of(activations)
    if tile is None:
        tile = _tiles.tile("weighted_sum", T, D, P, dtype, arch)
    if N * T > 2**31 - tile.BLOCK_T:  # the kernel counts them in 32 bits, a block past the last included
        raise ValueError(f"N·T = {N * T} rows: at most 2³¹ - {tile.BLOCK_T}")
    flat = tile.layout == "flat"
    step = 1 if flat else _tiles.row_step("weighted_sum", T, D, P, dtype)
    activations, backprops = brought_to_step(tile, step, activations, backprops)
    if flat:
        a, b, described = activations, backprops, False
    else:
        a, b, described = row_sources(tile, (activations, tile.BLOCK_D), (backprops, tile.BLOCK_P))
    tiles_p = cdiv(P, tile.BLOCK_P)
    tiles = tiles_p * cdiv(D, tile.BLOCK_D)
    programs = tiles + (tiles_p if bias else 0)
    steps = cdiv(N * T, tile.BLOCK_T) if flat else N * cdiv(T, tile.BLOCK_T)
    splits = _tiles.sum_splits(tile, steps, D, P, dtype, arch)
    of_parts = out_dtype if splits == 1 else torch.float32
    out = empty((splits, P, D), of_parts, device)
    bias_out = empty((splits, P), of_parts, device) if bias else None
    if programs:
        launch(
            _weighted_sum_kernel,
            splits * programs,
            tile,
            device,
            a=a,
            b=b,
            c_ptr=clip_factor,
            out_ptr=out,
            bias_ptr=bias_out,
            stride_an=activations.stride(0),
            stride_at=activations.stride(1),
            stride_bn=backprops.stride(0),
            stride_bt=backprops.stride(1),
            stride_cn=clip_factor.stride(0),
            N=N,
            T=T,
            D=D,
            P=P,
            steps=steps,
            steps_per_split=cdiv(steps, splits),
            BIAS=bias,
            FLAT=flat,
            SPLIT=dtype != torch.float32,
            STEP=step,
            TMA=described,
            WIDEN=widens(_weighted_sum_kernel),
            BLOCK_T=tile.BLOCK_T,
            BLOCK_D=tile.BLOCK_D,
            BLOCK_P=tile.BLOCK_P,
        )
    if splits == 1:
        return WeightedSumResult(out[0], bias_out[0] if bias else None)
    return WeightedSumResult(out.sum(0).to(out_dtype), bias_out.sum(0).to(out_dtype) if bias else None)
