"""Per-sample gradients of the weight of a layer or RMS norm, and what bounds their error.

    x̂[n, t] = (x[n, t] - m) / √(v + ε)        m, v: the row's mean and variance; of an RMS norm 0 and mean square
    sum[n]  = Σ_t b[n, t] ∘ x̂[n, t]
    e[n, t] = r·(1 + |m|/√(v + ε))·(‖b[n, t]‖ + ‖b[n, t] ∘ x̂[n, t]‖) + g·‖b[n, t] ∘ x̂[n, t]‖

r bounds the relative error of x̂ per (1 + |m|/√(v + ε)) and g that of the sum over t; the caller knows both. With
Σ_t b too, which is the bias's gradient, and ‖b[n, t]‖.

Tiling: rows of one sample in chunks of a length that T and D fix, one program a chunk; BLOCK_T whole rows of
BLOCK_D >= D features at a time, read once. fp32 throughout; what the chunks leave is added by `weighted_rows`. Where
the statistics say nothing (an overflow, or no variance beside a small ε), e is infinite.
Reference: `(b.double() * layer_norm(x.double())).sum(1)`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._launch import launch
from ._partials import rounded_product
from ._repeat import empty, repeats
from ._tiles import Tile, cdiv, next_power_of_2
from .weighted_rows import weighted_rows

WIDEST = 8192
"""Features of a row that a program holds."""

_STEPS = 8  # blocks of rows a chunk has


@triton.jit(do_not_specialize=["T", "chunks", "chunk"])
def _normalized_sum_kernel(
    x_ptr,  # (N, T, D)
    b_ptr,  # (N, T, D)
    sums_ptr,  # (N, chunks, D)
    bias_ptr,  # None, or likewise
    error_ptr,  # (N, T)
    norm_ptr,  # (N, T)
    stride_xn,
    stride_xt,
    stride_bn,
    stride_bt,
    T,
    D,
    chunks,
    chunk,  # rows of each
    eps,
    largest,  # 1 / √(v + ε) above which nothing is known
    relative,  # r
    added,  # g
    lost,  # of a squared norm, where squares underflow
    MEAN: tl.constexpr,
    CONSTANT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # locate
    pid = tl.program_id(0)
    pid_n = (pid // chunks).to(tl.int64)
    first = pid % chunks * chunk
    last = tl.minimum(first + chunk, T)
    x_ptr += pid_n * stride_xn
    b_ptr += pid_n * stride_bn
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D

    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    biases = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask_t = offs_t < last
        mask = mask_t[:, None] & mask_d[None, :]
        rows = offs_t.to(tl.int64)
        x = tl.load(x_ptr + rows[:, None] * stride_xt + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + rows[:, None] * stride_bt + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        if CONSTANT:  # of such a row x̂ is exactly 0
            low = tl.min(tl.where(mask_d[None, :], x, float("inf")), axis=1)
            high = tl.max(tl.where(mask_d[None, :], x, float("-inf")), axis=1)
            constant = (low == high) & (tl.abs(low) < float("inf")) & (MEAN or low == 0.0)
        mean = tl.zeros((BLOCK_T,), tl.float32)
        if MEAN:
            mean = tl.sum(x, axis=1) / D
            x = tl.where(mask_d[None, :], x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(rounded_product(x, x), axis=1) / D + eps)
        known = (rstd > 0.0) & (rstd <= largest)  # NaN is not
        none = ~mask_t
        if CONSTANT:
            none = none | (constant & (rstd >= 0.0))  # low and high pass over a NaN, rstd does not
        product = b * tl.where(none[:, None], 0.0, x * rstd[:, None])
        sums += product
        biases += b
        norm_b = tl.sqrt_rn(tl.sum(rounded_product(b, b), axis=1) + lost)
        norm = tl.sqrt_rn(tl.sum(rounded_product(product, product), axis=1) + lost)
        of_row = tl.where(none, 0.0, relative * (1.0 + tl.abs(mean * rstd)))
        error = of_row * (norm_b + norm) + added * norm
        tl.store(error_ptr + pid_n * T + rows, tl.where(known | none, error, float("inf")), mask=mask_t)
        tl.store(norm_ptr + pid_n * T + rows, norm_b, mask=mask_t)
    tl.store(sums_ptr + tl.cast(pid, tl.int64) * D + offs_d, tl.sum(sums, axis=0), mask=mask_d)
    if bias_ptr is not None:
        tl.store(bias_ptr + tl.cast(pid, tl.int64) * D + offs_d, tl.sum(biases, axis=0), mask=mask_d)


class NormalizedSumResult(NamedTuple):
    sums: torch.Tensor
    bias: torch.Tensor | None
    error: torch.Tensor
    row_norm_backprops: torch.Tensor


@repeats
def normalized_sum(
    x: torch.Tensor,
    backprops: torch.Tensor,
    *,
    eps: float,
    mean: bool,
    bias: bool = False,
    largest: float = float("inf"),
    constant: bool = False,
    relative: float,
    added: float,
) -> NormalizedSumResult:
    """Per-sample gradients of a norm's weight and bias.

    Args:
        x, backprops: (N, T, D), bf16, fp16 or fp32, unit last stride, D <= `WIDEST`.
        eps: ε. mean: whether the mean is taken off, as in a layer norm. bias: also return Σ_t b.
        largest: 1/√(v + ε) above which the statistics say nothing.
        constant: of a row whose entries are all the same (of an RMS norm: all 0) x̂ is 0, exactly.
        relative, added: r and g, see above.
    Returns: sums and bias (N, D), error e and row_norm_backprops (N, T), all fp32. Norms are no smaller for what
        underflows.
    Raises: ValueError where a row is too wide.
    Cost: both inputs are read once; workspace 4 bytes a feature and chunk.
    Edge cases: T = 0 gives zeros.
    """
    N, T, D = x.shape
    if D > WIDEST:
        raise ValueError(f"rows of at most {WIDEST} features, not {D}")
    device = x.device
    tile = _tile(D)
    chunk = _STEPS * tile.BLOCK_T
    chunks = max(1, cdiv(T, chunk))

    def new(*shape: int) -> torch.Tensor:
        return empty(shape, torch.float32, device)

    if 0 in (N, T, D):
        nothing = torch.zeros((N, D), dtype=torch.float32, device=device)
        return NormalizedSumResult(nothing, nothing.clone() if bias else None, new(N, T), new(N, T))
    sums, error, norm = new(N, chunks, D), new(N, T), new(N, T)
    biases = new(N, chunks, D) if bias else None
    launch(
        _normalized_sum_kernel,
        N * chunks,
        tile,
        device,
        x_ptr=x,
        b_ptr=backprops,
        sums_ptr=sums,
        bias_ptr=biases,
        error_ptr=error,
        norm_ptr=norm,
        stride_xn=x.stride(0),
        stride_xt=x.stride(1),
        stride_bn=backprops.stride(0),
        stride_bt=backprops.stride(1),
        T=T,
        D=D,
        chunks=chunks,
        chunk=chunk,
        eps=float(eps),
        largest=float(largest),
        relative=float(relative),
        added=float(added),
        lost=D * 2.0**-126,
        MEAN=mean,
        CONSTANT=constant,
        BLOCK_T=tile.BLOCK_T,
        BLOCK_D=tile.BLOCK_D,
    )
    return NormalizedSumResult(_whole(sums), None if biases is None else _whole(biases), error, norm)


def _whole(chunks: torch.Tensor) -> torch.Tensor:
    return chunks.squeeze(1) if chunks.shape[1] == 1 else weighted_rows(chunks)


@lru_cache(maxsize=256)
def _tile(D: int) -> Tile:
    width = max(16, next_power_of_2(D))
    warps = 4 if width <= 2048 else 8
    rows = min(8, max(1, 2048 // width))  # 16 spill on sm_100 where they are loaded element by element
    return Tile(rows, width, 0, 0, warps, 1, "from static analysis: 16 entries a thread of x and b, two accumulators")
