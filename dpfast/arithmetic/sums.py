"""Sums of squares, and sums whose bits do not depend on the batch: no fp32 sum is longer than a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dpfast.arithmetic.precision import accumulating_dtype, smallest_normal
from dpfast.arithmetic.row_norms import taken_once
from dpfast.arithmetic.tracing import is_traced, operator

SUM_BLOCK = 1024
"""The longest run of terms that one fp32 sum of squares adds up (see ``bounds``)."""


def row_norm(x: Tensor, *, once: bool = False) -> Tensor:
    """L2 norms along the last dimension for error bounds, in fp64; no fp32 sum is longer than ``SUM_BLOCK`` terms, and
    squares that underflow make none too small. ``once``: of what a layer saw, see ``row_norms``."""
    return no_smaller(taken_once(raw_row_norm, x) if once else raw_row_norm(x), lost_to_underflow(x))


def no_smaller(raw: Tensor, lost: float) -> Tensor:
    """Norms in fp64 with what underflow may have taken from them; a new tensor."""
    return raw.to(torch.float64, copy=True).add_(lost)


def raw_row_norm(x: Tensor) -> Tensor:
    """As :func:`row_norm`, in some dtype; each norm may be smaller by :func:`lost_to_underflow`."""
    if x.shape[-1] > SUM_BLOCK or x.stride(-1) != 1:
        return row_sq_norm(x).sqrt_()
    if x.dtype is not torch.float32:
        x = x.to(accumulating_dtype(x))
    return torch.linalg.vector_norm(x, dim=x.dim() - 1)  # with -1 torch 2.8's fakes keep a dimension of 1


def lost_to_underflow(x: Tensor) -> float:
    """What a row's norm may lack where squares underflow."""
    return (x.shape[-1] * smallest_normal(x.dtype)) ** 0.5


def row_sq_norm(x: Tensor) -> Tensor:
    """Squared L2 norms along the last dimension, in fp64; no fp32 sum is longer than ``SUM_BLOCK`` terms."""
    x = x.to(accumulating_dtype(x))
    width = x.shape[-1]
    if width <= SUM_BLOCK:
        if x.dim() == 3 and x.shape[0] > 0 and x.stride(1) == 1 < x.stride(2) and not is_traced():
            # Channels first. vector_norm is 20 times slower there than a sum over the slow dimension.
            squares = torch.empty_like(x[0])
            return torch.stack([torch.mul(x_n, x_n, out=squares).sum(-1) for x_n in x]).double()
        return torch.linalg.vector_norm(x, dim=x.dim() - 1).double().square_()
    whole = width - width % SUM_BLOCK
    blocks = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (-1, SUM_BLOCK)), dim=x.dim())
    total = blocks.double().square_().sum(-1)
    return total + row_sq_norm(x[..., whole:]) if whole < width else total


def sum_blocks(x: Tensor) -> Tensor:
    """Sum over the last dimension of an fp64 tensor in blocks: torch splits one long sum over its threads, and then
    the last bit depends on how many sums run at once."""
    while x.shape[-1] > SUM_BLOCK:
        whole = x.shape[-1] - x.shape[-1] % SUM_BLOCK
        blocks = x[..., :whole].unflatten(-1, (-1, SUM_BLOCK)).sum(-1)
        x = torch.cat([blocks, x[..., whole:]], dim=-1)
    return x.sum(-1)


@lru_cache(maxsize=4096)
def sum_block(length: int) -> int:
    """Into blocks of how many terms a sum of ``length`` is cut whose error is to be small: the largest divisor up to
    64, or no cut where that is less than 8."""
    block = next(b for b in range(min(64, max(1, length)), 0, -1) if length % b == 0)
    return block if block >= 8 else length


def sums_of_products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ_t x_nct y_nct`` and ``Σ_t y_nct``, (N, C) in fp64, each added in blocks (:func:`sum_block`)."""
    n, channels = x.shape[:2]
    if x.numel() == 0:
        none = x.new_zeros(n, channels, dtype=torch.float64)
        return none, none
    products, totals = (s.view(n, channels, -1).sum(-1, dtype=torch.float64) for s in sums_of_blocks(x)(y))
    return products, totals


def sums_of_blocks(x: Tensor) -> Callable[[Tensor], Sequence[Tensor]]:
    """What gives, for y, of each block of entries ``Σ x y`` and ``Σ y``, (blocks,) each, where neither is empty and the
    last dimension is ``sum_block`` after ``sum_block``.

    A group norm's backward gives just these for weight and bias where mean is 0 and rstd 1; every block is a channel.
    """
    block = sum_block(x.shape[-1])
    rows = x.numel() // block
    none, one, weight = _none_and_ones(rows, x.dtype, x.device) if not is_traced() else _made(rows, x.dtype, x.device)
    return lambda y: _backward(y, x, none, one, weight, 1, rows, block, 1, [False, True, True])[1:]


_backward = operator(torch.ops.aten.native_group_norm_backward.default)


def _made(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, rstd and a weight of which nothing but the shape is used."""
    one = torch.ones(1, 1, dtype=dtype, device=device)
    return torch.zeros(1, 1, dtype=dtype, device=device), one, one.view(1).expand(rows)


_none_and_ones = lru_cache(maxsize=256)(_made)


def norm_of_rows(row_norms: Tensor) -> Tensor:
    """The norm of all rows from theirs, (..., R) -> (...) fp64, in blocks as :func:`sum_blocks`."""
    while row_norms.shape[-1] > SUM_BLOCK:
        whole = row_norms.shape[-1] - row_norms.shape[-1] % SUM_BLOCK
        blocks = norm_of_rows(row_norms[..., :whole].unflatten(-1, (-1, SUM_BLOCK)))
        row_norms = torch.cat([blocks, row_norms[..., whole:].double()], dim=-1)
    return torch.linalg.vector_norm(row_norms, dim=row_norms.dim() - 1, dtype=torch.float64)


def rows_of_entries(values: Tensor) -> Tensor:
    """(N, ...) as (N, rows, width). Rows of a kernel's 3 or 9 would be slow, longer sums than need be less exact."""
    width, dims = 1, values.dim()
    while dims > 1 and (dims == values.dim() or (width < 16 and width * values.shape[dims - 1] <= SUM_BLOCK)):
        dims -= 1
        width *= values.shape[dims]
    if dims > 1 and width < 16 and values.numel():  # a part of the next dimension
        width *= next(some for some in range(SUM_BLOCK // width, 0, -1) if values.shape[dims - 1] % some == 0)
        return values.reshape(len(values), -1, width)
    return values.reshape(values.shape[0], values.shape[1:dims].numel(), width)


def add_rows(total: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """``total[places] += rows`` in the order of the rows, in place. A GPU's index_add_ has atomics, which add in any
    order; its index_put_ sorts."""
    if total.device.type == "cpu" or is_traced():
        return total.index_add_(0, places, rows)
    return total.index_put_((places,), rows, accumulate=True)
