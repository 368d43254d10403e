"""Sum what the programs of a sample left behind: the second stages of norms and of sums split over T.

    out[r, n] = Σ_i partials[n, r·L + i],   0 <= i < L

One program a sum, L values in blocks of 256, in fp64 and in an order fixed by L alone: no atomics, and
bitwise the same in whatever batch a sample stands. `torch.sum` promises neither.
Reference: `partials.double().unflatten(1, (-1, L)).sum(2).T`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import launch
from ._rows import run_of
from ._tiles import Tile, cdiv

_TILE = Tile(0, 0, 0, 256, 4, 1, "from static analysis: two values a thread")
_PARTS_TILE = Tile(0, 0, 0, 1024, 4, 1, "from static analysis: eight values a thread, 16-byte loads")


@triton.jit
def rounded_product(x, y):
    """x·y, rounded, for a reduction over lanes.

    Of `x * y` and the reduction's first addition the compiler makes one fma: a lane then adds its own product unrounded
    to its neighbour's rounded one, and of two lanes that store one sum each has another last bit. Which one stays
    is nobody's promise. An fma with +0 is no product to it: -0 + 0 is not -0.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def sum_tile(tile):
    """Sum of a 2-D tile: each row over its columns, then the rows.

    The rows keep their second dim between the two: on sm_100 Triton 3.7.1 aborts in
    TritonNvidiaGPUOptimizeTMemLayouts when a 1-D reduction follows that of a tile from tensor memory.
    """
    return tl.sum(tl.sum(tile, axis=1, keep_dims=True))


@triton.jit(do_not_specialize=["N", "slots", "length"])
def _sum_partials_kernel(
    partials_ptr,
    out_ptr,
    runs_ptr,  # None, or which of one row's slots are a sum's (N, 2)
    N,
    slots,
    length,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0)
    pid_r = pid // N
    pid_n = pid % N
    first = pid_r * length
    last = tl.minimum(first + length, slots)
    row_ptr = partials_ptr + pid_n.to(tl.int64) * slots
    if runs_ptr is not None:
        place, last = run_of(runs_ptr, pid)
        row_ptr = partials_ptr + place
        first = 0
    acc = tl.zeros((BLOCK_K,), tl.float64)
    for start in range(first, last, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        acc += tl.load(row_ptr + offs_k, mask=offs_k < last, other=0.0).to(tl.float64)
    tl.store(out_ptr + pid, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty))


def sum_partials(partials: torch.Tensor, length: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Sum runs of `length` (the last may be shorter) of each row of `partials` (N, slots).

    Returns one tensor (N,) a run, fp32, or fp64 of fp64; views of `partials` where there is nothing to add.
    out: (runs, N), contiguous, where they are to stand.
    """
    N, slots = partials.shape
    if length == 1:
        return partials.unbind(1) if out is None else out.copy_(partials.T).unbind(0)
    sums = cdiv(slots, length)
    if out is None:
        out = torch.empty((sums, N), dtype=partials.dtype, device=partials.device)
    launch(
        _sum_partials_kernel,
        sums * N,
        _TILE,
        partials.device,
        partials_ptr=partials,
        out_ptr=out,
        runs_ptr=None,
        N=N,
        slots=slots,
        length=length,
        BLOCK_K=_TILE.BLOCK_K,
    )
    return out.unbind(0)


def sum_runs(values: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    """Sums of the runs [runs[u, 0], runs[u, 1]) of `values` (R,), fp64 or fp32: (U,) fp64.

    In an order that is fixed by a run's own length.
    """
    out = torch.empty(len(runs), dtype=torch.float64, device=values.device)
    if len(runs):
        launch(
            _sum_partials_kernel,
            len(runs),
            _TILE,
            values.device,
            partials_ptr=values,
            out_ptr=out,
            runs_ptr=runs,
            N=len(runs),
            slots=0,
            length=0,
            BLOCK_K=_TILE.BLOCK_K,
        )
    return out


@triton.jit(do_not_specialize=["parts", "first_n", "slots", "first_slot"])
def _add_parts_kernel(
    parts_ptr,  # (samples · parts, length)
    out_ptr,  # (N, length)
    partials_ptr,  # (N, slots)
    parts,
    length,
    scale,
    first_n,
    slots,
    first_slot,
    WRITE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks = tl.cdiv(length, BLOCK_K)
    pid = tl.program_id(0)
    pid_n = (pid // blocks).to(tl.int64)
    block = pid % blocks
    offs_k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = offs_k < length
    part_ptr = parts_ptr + pid_n * parts * length
    acc = tl.zeros((BLOCK_K,), tl.float32)
    for i in range(parts):
        acc += tl.load(part_ptr + tl.cast(i, tl.int64) * length + offs_k, mask=mask, other=0.0)
    acc *= scale
    n = first_n + pid_n
    if WRITE:
        tl.store(out_ptr + n * length + offs_k, acc.to(out_ptr.dtype.element_ty), mask=mask)
    if NORM:
        tl.store(partials_ptr + n * slots + first_slot + block, tl.sum(rounded_product(acc, acc), axis=0))


def part_blocks(length: int) -> int:
    """How many partial squared norms `add_parts` leaves of a sample's `length` numbers."""
    blocks: int = cdiv(length, _PARTS_TILE.BLOCK_K)
    return blocks


def add_parts(
    workspace: torch.Tensor,
    parts: int,
    scale: float,
    out: torch.Tensor | None,
    partials: torch.Tensor | None,
    first: int,
    count: int,
    first_slot: int,
) -> None:
    """Samples [first, first + count): add the parts of each, in sequence in fp32, and scale the sum.

    Args:
        workspace: (at least count · parts, ...) fp32, contiguous, a sample's parts next to each other.
        out: (N, ...), contiguous; where the sums go, or None.
        partials: (N, slots) fp32; slots [first_slot, first_slot + part_blocks) get the sums' squares; or None.
    """
    length = workspace[0].numel()
    launch(
        _add_parts_kernel,
        count * part_blocks(length),
        _PARTS_TILE,
        workspace.device,
        parts_ptr=workspace,
        out_ptr=out,
        partials_ptr=partials,
        parts=parts,
        length=length,
        scale=float(scale),
        first_n=first,
        slots=0 if partials is None else partials.shape[1],
        first_slot=first_slot,
        WRITE=out is not None,
        NORM=partials is not None,
        BLOCK_K=_PARTS_TILE.BLOCK_K,
    )
