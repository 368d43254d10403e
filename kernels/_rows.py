"""How a kernel reads a block of rows of one sample: through pointers, or through a tensor descriptor (TMA).

A descriptor's loads are issued by one thread, need no registers for addresses and fill with zeros what lies
outside the tensor, so they need no masks; hardware takes them from sm_90 on. Both ways read the same numbers, but the
compiler lays them out otherwise, so the order in which a product adds up, and with it the last bits, may be another.

Where samples are runs of rows (units with any number of rows), unit u has the positions [runs[u, 0], runs[u, 1]) of one
list (1, R, F). A kernel then moves its pointers to the run's first row and takes its length for T, so everything behind
that is a sample's, the order of addition too where samples are read through pointers. Runs are read through pointers: a
descriptor ends where the tensor ends, not where the run does, and would read the next unit's rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ._tiles import Tile

_DESCRIPTOR_STRIDE_LIMIT = 2**40  # bytes, cuTensorMapEncodeTiled


@triton.jit
def load_rows(
    x,  # pointer to (N, T, F), or its descriptor with blocks (1, BLOCK_T, BLOCK_F)
    stride_n,
    stride_t,
    n,
    t,
    f,
    T,
    F,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """x[n, t : t + BLOCK_T, f : f + BLOCK_F], zero outside (T, F)."""
    if TMA:
        return x.load([n, t, f]).reshape(BLOCK_T, BLOCK_F)
    else:
        offs_t = t + tl.arange(0, BLOCK_T)
        offs_f = f + tl.arange(0, BLOCK_F)
        # In int64 before the product: a row stride may be as long as the whole batch.
        row_ptrs = x + tl.cast(n, tl.int64) * stride_n + offs_t.to(tl.int64) * stride_t
        return tl.load(
            row_ptrs[:, None] + offs_f[None, :], mask=(offs_t < T)[:, None] & (offs_f < F)[None, :], other=0.0
        )


@triton.jit
def load_columns(
    x,  # see `load_rows`
    stride_n,
    stride_t,
    n,
    t,
    f,
    T,
    F,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """The block of `load_rows`, transposed: (BLOCK_F, BLOCK_T), for the first operand of a dot over positions.

    The pointers are transposed, not the loaded block: under `tl.trans` of a load the pipeline of sm_80 (Triton 3.7.1)
    keeps the block of every stage in registers and stores it to shared memory itself, behind a barrier of its own.
    """
    if TMA:
        return tl.trans(load_rows(x, stride_n, stride_t, n, t, f, T, F, TMA, BLOCK_T, BLOCK_F))
    else:
        offs_t = t + tl.arange(0, BLOCK_T)
        offs_f = f + tl.arange(0, BLOCK_F)
        row_ptrs = x + tl.cast(n, tl.int64) * stride_n + offs_t.to(tl.int64) * stride_t
        return tl.load(
            row_ptrs[None, :] + offs_f[:, None], mask=(offs_f < F)[:, None] & (offs_t < T)[None, :], other=0.0
        )


@triton.jit
def column_sums(
    b,  # (N, T, P), see `load_rows`
    stride_bn,
    stride_bt,
    n,
    p,
    first_t,
    last_t,
    T,
    P,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Σ_t b[n, t] of one block of columns in fp32, zero outside P: T / BLOCK_T additions, then the block's."""
    acc = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for t in range(first_t, last_t, BLOCK_T):
        acc += load_rows(b, stride_bn, stride_bt, n, t, p, T, P, TMA, BLOCK_T, BLOCK_P).to(tl.float32)
    return tl.sum(acc, axis=0)


@triton.jit
def run_of(runs_ptr, n):
    """The first position of unit n's run, in 64 bits, and its length."""
    runs_ptr += 2 * tl.cast(n, tl.int64)
    first = tl.load(runs_ptr)
    return first, (tl.load(runs_ptr + 1) - first).to(tl.int32)


def sizes(activations: torch.Tensor, runs: torch.Tensor | None, longest: int) -> tuple[int, int]:
    """N and T of a launch: those of the tensor (N, T, ·), or how many runs there are and the longest one's positions.

    Raises: ValueError where runs (U, 2) do not go with one list of rows (1, R, ·).
    """
    N, T, _ = activations.shape
    if runs is None:
        return N, T
    if runs.shape[1:] != (2,) or runs.dtype != torch.int64 or not runs.is_contiguous():
        raise ValueError(f"runs are (U, 2) int64, contiguous, not {tuple(runs.shape)} {runs.dtype}")
    if N != 1 or runs.device != activations.device:
        raise ValueError(f"runs are of one list of rows (1, R, ·) on their device, not of {tuple(activations.shape)}")
    return len(runs), longest


def row_sources(tile: Tile, *operands: tuple[torch.Tensor, int]) -> tuple[Any, ...]:
    """What a kernel reads each (tensor (N, T, F), block of F) through, and whether all are descriptors.

    Descriptors where the tile asks for them and every tensor's layout allows it, else the tensors.
    """
    if tile.TMA and all(_describable(x) for x, _ in operands):
        return *(_descriptor(x, tile.BLOCK_T, block) for x, block in operands), True
    return *(x for x, _ in operands), False


def brought_to_step(tile: Tile, step: int, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands, or copies of those whose rows are no multiple of `step` long, with zeros to the next one.

    None where all can be described as they are. Else kernels read whole rows of the copies, zeros included, so that
    masks, too, end at multiples: only then do loads through pointers take 16 bytes.
    """
    if step == 1 or (tile.TMA and all(_describable(x) for x in operands)):
        return operands
    return tuple(x if x.shape[2] % step == 0 else lengthened(x, step) for x in operands)


def lengthened(x: torch.Tensor, step: int) -> torch.Tensor:
    """A copy whose rows are multiples of `step` long, with zeros behind those of x."""
    N, T, F = x.shape
    longer = torch.empty((N, T, -(-F // step) * step), dtype=x.dtype, device=x.device)
    longer[:, :, :F] = x
    longer[:, :, F:] = 0
    return longer


def _describable(x: torch.Tensor) -> bool:
    """What cuTensorMapEncodeTiled demands: 16-byte steps, and strides that nest as those of a padded block do."""
    size = x.element_size()
    T, F = x.shape[1:]
    stride_n, stride_t = _nested_strides(x)
    return (
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and stride_t * size % 16 == 0
        and stride_t >= F
        and stride_n % stride_t == 0
        and stride_n >= T * stride_t
        and stride_n * size < _DESCRIPTOR_STRIDE_LIMIT
    )


def _nested_strides(x: torch.Tensor) -> tuple[int, int]:
    """(stride of n, stride of t), those of dims of size 1, which are never taken, replaced by ones that nest."""
    N, T, F = x.shape
    step = 16 // x.element_size()
    stride_t = x.stride(1) if T > 1 else -(-F // step) * step
    return x.stride(0) if N > 1 else T * stride_t, stride_t


def _descriptor(x: torch.Tensor, block_t: int, block_f: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [*_nested_strides(x), 1], [1, block_t, block_f])
