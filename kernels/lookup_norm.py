"""Lookup norm: squared norms of an embedding's per-sample gradients, which are never written.

    G[n, v]  = Σ_{t: index[n, t] = v} b[n, t]                       (D,), row v of the table
    q[n]     = Σ_v ‖G[n, v]‖²
    s²[n]    = Σ_v m_v² k_v Σ_{t: index[n, t] = v} ‖b[n, t]‖²

k_v positions have index v, and m_v = ⌈k_v / R⌉ + min(k_v, R) - 2 is how many additions round an entry of row v.

Each sample's indices are sorted, which brings equal ones together in a run. Tiling: one program a sorted position; the
first of a run walks it in steps of R = BLOCK_R rows, the others leave zeros. BLOCK_D features at a time, so b is read
once. s comes from the same loads and bounds the rounding of G (docs/bounds.md); a row that is looked up once has none.
Order of addition: a run's positions in their own order, as the sort is stable: R sums in sequence, then these; squares
over BLOCK_D features at a time; runs in fp64 (`_partials`). It does not depend on N.
Reference: `zeros(N, V, D).index_put((n, index), b, accumulate=True).square().sum((1, 2))`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._launch import arch_of, launch, validate
from ._partials import rounded_product, sum_partials, sum_runs, sum_tile
from ._rows import sizes
from ._tiles import Tile, cdiv, next_power_of_2

_NOBODYS = 2**62


@triton.jit(do_not_specialize=["T", "padding_idx"])
def _lookup_norm_kernel(
    b_ptr,  # backprops (N, T, D)
    index_ptr,  # sorted (N, T)
    order_ptr,  # the positions they come from (N, T)
    partials_ptr,  # (N, 2 · T)
    stride_bn,
    stride_bt,
    stride_in,  # sorted indices
    stride_it,
    stride_on,  # their positions
    stride_ot,
    T,
    D,
    padding_idx,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # locate
    pid = tl.program_id(0)
    pid_n = (pid // T).to(tl.int64)
    first = pid % T
    b_ptr += pid_n * stride_bn
    index_ptr += pid_n * stride_in
    order_ptr += pid_n * stride_on
    place = first.to(tl.int64)
    index = tl.load(index_ptr + place * stride_it)
    before = tl.load(index_ptr + (place - 1) * stride_it, mask=first > 0, other=-1)
    starts_run = (index != before) & (index != padding_idx)

    offs_r = tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    sq_norm = 0.0
    squares = 0.0
    last = first
    if starts_run:
        for d in range(0, D, BLOCK_D):
            acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            acc_squares = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            last = first
            inside = BLOCK_R
            while inside == BLOCK_R:
                offs_t = last + offs_r
                places = offs_t.to(tl.int64)
                mask_t = tl.load(index_ptr + places * stride_it, mask=offs_t < T, other=-1) == index
                t = tl.load(order_ptr + places * stride_ot, mask=mask_t, other=0)
                b_rows = tl.load(
                    b_ptr + t[:, None] * stride_bt + (d + offs_d)[None, :],
                    mask=mask_t[:, None] & (d + offs_d < D)[None, :],
                    other=0.0,
                ).to(tl.float32)  # (BLOCK_R, BLOCK_D)
                # G[n, v] += b
                acc += b_rows
                acc_squares += b_rows * b_rows
                inside = tl.sum(mask_t.to(tl.int32), axis=0)
                last += inside
            row = tl.sum(acc, axis=0)
            sq_norm += tl.sum(rounded_product(row, row), axis=0)
            squares += sum_tile(acc_squares)

    length = last - first
    rounded = (tl.cdiv(length, BLOCK_R) + tl.minimum(length, BLOCK_R) - 2).to(tl.float32)
    # Where a run of one overflows, 0 · inf would be NaN.
    products = tl.where(length > 1, rounded * rounded * length.to(tl.float32) * squares, 0.0)
    partials_ptr += pid_n * 2 * T + first
    tl.store(partials_ptr, sq_norm)
    tl.store(partials_ptr + T, products)


class LookupNormResult(NamedTuple):
    """(N,) fp32 each. No fp32 sum of squares behind ``sq_norm`` is longer than ``width`` terms."""

    sq_norm: torch.Tensor
    sq_products: torch.Tensor
    width: int


def row_tile(D: int, arch: str) -> Tile:
    """BLOCK_T rows of a run and BLOCK_D features at a time."""
    if arch == "interpreter":
        return Tile(4, 32, 0, 0, 4, 1, "interpreter")
    block = min(1024, max(32, next_power_of_2(D)))
    return Tile(8, block, 0, 0, max(1, block // 128), 1, "from static analysis: 32 elements a thread, no spill")


def lookup_norm(
    indices: torch.Tensor,
    backprops: torch.Tensor,
    *,
    padding_idx: int | None = None,
    tile: Tile | None = None,
    ids: torch.Tensor | None = None,
    runs: torch.Tensor | None = None,
    entries: int = 0,
) -> LookupNormResult:
    """Squared norms of an embedding's per-sample gradients, with what bounds their error.

    Maths: q[n] = Σ_v ‖Σ_{t: indices[n, t] = v} b[n, t]‖², and s² as above.
    Args:
        indices: (N, T) int32 or int64, not negative, any strides.
        backprops: (N, T, D), bf16, fp16 or fp32, unit last stride.
        padding_idx: positions with this index add nothing, and are not read.
        tile: instead of the shape's own; its BLOCK_T and BLOCK_D.
        ids, runs, entries: N units of any number of positions instead, of indices (1, R) below `entries` and backprops
            (1, R, D). ids (R,) int64 are the positions' units, -1 nobody's; of positions in order of them, nobody's
            last, the n-th sum is of [runs[n, 0], runs[n, 1]), (N, 2) int64. The bits are those of samples.
    Returns: fresh tensors.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: the rows in fp32, their squares in fp32, runs in fp64. Deterministic.
    Cost: a sort of the indices, one launch that reads b once, and one for the sums over runs; workspace 8 bytes a
        position, and the sorted indices.
    Edge cases: N = 0 is empty; T or D = 0 gives zeros.
    """
    validate(backprops)
    N, T, D = backprops.shape
    device = backprops.device
    if indices.shape != (N, T) or indices.dtype not in (torch.int32, torch.int64) or indices.device != device:
        raise ValueError(f"indices are ({N}, {T}) integers on {device}, not {tuple(indices.shape)} {indices.dtype}")
    if tile is None:
        tile = row_tile(D, arch_of(backprops))
    if runs is not None:
        sizes(backprops, runs, 0)
    width = min(D, tile.BLOCK_D) + cdiv(D, tile.BLOCK_D)
    if 0 in (N, T, D) or (runs is not None and len(runs) == 0):
        zeros = torch.zeros(N if runs is None else len(runs), dtype=torch.float32, device=device)
        return LookupNormResult(zeros, zeros.clone(), width)
    if ids is not None:  # another number for each unit and index, the largest for nobody's
        indices = torch.where(ids < 0, _NOBODYS, ids * entries + indices)
    # Stable: equal indices keep their positions' order, whatever stands beside them. Strides follow the input's.
    index, order = indices.sort(dim=1, stable=True)
    if ids is not None:
        nothing = index == _NOBODYS
        if padding_idx is not None:
            nothing |= index % entries == padding_idx
        index, padding_idx = index.masked_fill(nothing, -1), None
    partials = torch.empty((N, 2 * T), dtype=torch.float32, device=device)
    launch(
        _lookup_norm_kernel,
        N * T,
        tile,
        device,
        b_ptr=backprops,
        index_ptr=index,
        order_ptr=order,
        partials_ptr=partials,
        stride_bn=backprops.stride(0),
        stride_bt=backprops.stride(1),
        stride_in=index.stride(0),
        stride_it=index.stride(1),
        stride_on=order.stride(0),
        stride_ot=order.stride(1),
        T=T,
        D=D,
        padding_idx=-1 if padding_idx is None else padding_idx,
        BLOCK_R=tile.BLOCK_T,
        BLOCK_D=tile.BLOCK_D,
    )
    if runs is None:
        sq_norm, sq_products = sum_partials(partials, T)
    else:
        sq_norm, sq_products = (sum_runs(x, runs).float() for x in partials.view(2, T))
    return LookupNormResult(sq_norm, sq_products, width)
