"""The einsum path: what is right, in any dtype up to fp64, and the CPU's path.

All functions take ``activations`` (N, T, D) and ``backprops`` (N, T, P) and work on the outer products
``G_n = Σ_t b_nt a_ntᵀ`` (P, D). They accumulate in fp32, or in fp64 where an input is fp64. A norm never holds
more than :data:`WORKSPACE_BYTES` of intermediate results (or one tile, where one tile is larger).

A sample's numbers never depend on the batch it stands in: the loops below go over samples or over blocks whose
size follows from T, D and P, and matrix products whose result could depend on the batch's size
(``products.batched``) are taken so that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from typing import NamedTuple

import opt_einsum
import torch
import torch.nn.functional as F
from torch import Tensor

from dpfast import bounds, products
from dpfast.bounds import SquaredNorm

WORKSPACE_BYTES = 32 * 2**20
"""The most that a norm may hold in intermediate results at one time."""

_WORTH_TRANSPOSING = 2**17
"""Entries of a clipped sum from which oneDNN saves more than the transposed copies cost that it wants (AMD EPYC)."""

KEPT_BLOCK = 2**20
"""The most bytes of kept gradients that are made at a time, but of one sample: they are still in the cache when their
norm is taken, and find room where activations have been freed."""

SUM_BLOCK = 1024
"""The longest run of terms that one fp32 sum of squares adds up (see ``bounds``)."""


def exact_arithmetic() -> AbstractContextManager[object]:
    """Autocast off: our own arithmetic must not be rounded to 16 bits."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not on:  # asked for several times a layer
        return _NOTHING
    stack = ExitStack()
    for device in on:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_NOTHING = nullcontext()


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 where any of the tensors is fp64, else fp32."""
    for t in tensors:
        if t.dtype is torch.float64:
            return torch.float64
    return torch.float32


@lru_cache(maxsize=4096)
def _expression(equation: str, *shapes: tuple[int, ...]) -> Callable[..., Tensor]:
    return opt_einsum.contract_expression(equation, *shapes)


def contract(equation: str, *operands: Tensor) -> Tensor:
    """``opt_einsum.contract``, its path planned once for each equation and shapes."""
    return _expression(equation, *(tuple(x.shape) for x in operands))(*operands, backend="torch")


def grad_sample(activations: Tensor, backprops: Tensor, *, scale: float = 1.0) -> Tensor:
    """``scale · Σ_t b_nt a_ntᵀ`` of shape (N, P, D), in fp32 or fp64."""
    dtype = compute_dtype(activations, backprops)
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    t = activations.shape[1]
    if t == 1:
        return (backprops.mT * scale) * activations if scale != 1.0 else backprops.mT * activations
    block = bounds.CHAIN_BLOCK  # short chains of additions: see bounds.direct_error
    if t <= block:
        return products.batched(backprops.mT, activations, scale=scale)
    out = products.batched(backprops[:, :block].mT, activations[:, :block], scale=scale)
    for start in range(block, t, block):
        positions = slice(start, start + block)
        products.batched(backprops[:, positions].mT, activations[:, positions], scale=scale, add_to=out)
    return out


def grad_sample_blocks(activations: Tensor, backprops: Tensor) -> Iterator[Tensor]:
    """:func:`grad_sample` in blocks of samples of at most :data:`KEPT_BLOCK` bytes, or of one sample."""
    gradient = activations.shape[2] * backprops.shape[2] * compute_dtype(activations, backprops).itemsize
    n = max(1, KEPT_BLOCK // max(1, gradient))
    for a, b in zip(activations.split(n), backprops.split(n), strict=True):
        yield grad_sample(a, b)


def bias_grad_sample(backprops: Tensor, *, scale: float = 1.0) -> Tensor:
    """``scale · Σ_t b_nt`` of shape (N, P), in fp32 or fp64."""
    out = backprops.sum(dim=1, dtype=compute_dtype(backprops))
    return out.mul_(scale) if scale != 1.0 else out


def weighted_sum(activations: Tensor, backprops: Tensor, coefficients: Tensor) -> Tensor:
    """``Σ_n c_n Σ_t b_nt a_ntᵀ`` of shape (P, D); a sample with c_n = 0 adds exactly nothing, whatever it holds."""
    dtype = compute_dtype(activations, backprops)
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    c = coefficients.to(dtype)
    if _drops_samples(c):
        activations, backprops = (_without_dropped(x, c) for x in (activations, backprops))
    c = c[:, None, None]
    d, p = activations.shape[-1], backprops.shape[-1]
    if d * p >= _WORTH_TRANSPOSING and products.by_onednn(p, c.numel() * activations.shape[1], d, like=activations):
        return _transposed_product(backprops, activations, c)
    # The scaled copy is made of the smaller operand.
    if d <= p:
        activations = activations * c
    else:
        backprops = backprops * c
    if d < min(products.BATCH_INVARIANT_FROM, p):  # as in products
        return contract("ntp,ntd->dp", backprops, activations).mT.contiguous()
    return contract("ntd,ntp->pd", activations, backprops).contiguous()


def _transposed_product(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    """``Σ_n c_n Σ_t x_nt y_ntᵀ`` by oneDNN, which wants rows of length N·T: copied a workspace at a time."""
    c = c.expand(-1, x.shape[1], -1).reshape(-1)
    x, y = x.reshape(c.numel(), -1), y.reshape(c.numel(), -1)
    rows = max(1024, WORKSPACE_BYTES // (x.element_size() * (x.shape[1] + y.shape[1])))
    total = None
    for x_i, y_i, c_i in zip(x.mT.split(rows, 1), y.mT.split(rows, 1), c.split(rows), strict=True):
        if y.shape[1] <= x.shape[1]:
            y_i = torch.mul(y_i, c_i, out=x.new_empty(y_i.shape))
        else:
            x_i = torch.mul(x_i, c_i, out=x.new_empty(x_i.shape))
        part = products.onednn(x_i, y_i)
        total = part if total is None else total.add_(part)
    return total


def weighted_bias_sum(backprops: Tensor, coefficients: Tensor) -> Tensor:
    """``Σ_n c_n Σ_t b_nt`` of shape (P,)."""
    return weighted_rows([bias_grad_sample(backprops)], coefficients)


def weighted_rows(blocks: Sequence[Tensor], coefficients: Tensor) -> Tensor:
    """``Σ_n c_n v_n`` for values (N, ...) in blocks of samples, at least one; a sample with c_n = 0 adds exactly
    nothing, whatever it holds."""
    dtype, total = compute_dtype(blocks[0]), None
    weights = coefficients.to(dtype)
    masks = _drops_samples(weights)
    for values, c in zip(blocks, weights.split([len(v) for v in blocks]), strict=True):
        values = values.to(dtype).reshape(len(values), values.shape[1:].numel())
        if masks:
            values = _without_dropped(values, c)
        total = torch.mv(values.mT, c) if total is None else total.addmv_(values.mT, c)
    return total.view(blocks[0].shape[1:])


def _drops_samples(coefficients: Tensor) -> bool:
    """Whether a coefficient may be 0. Reading them back is free on a CPU; elsewhere it would wait for the device, so
    there we always mask."""
    return coefficients.device.type != "cpu" or 0.0 in coefficients.tolist()


def _without_dropped(x: Tensor, coefficients: Tensor) -> Tensor:
    """``x`` (N, ...) with zeros where a sample's coefficient is 0: 0·inf would be NaN in the sum."""
    return x.masked_fill((coefficients == 0).view(-1, *[1] * (x.dim() - 1)), 0.0)


def row_norm(x: Tensor) -> Tensor:
    """L2 norms along the last dimension for error bounds, in fp64; no fp32 sum is longer than ``SUM_BLOCK`` terms, and
    squares that underflow make none too small."""
    return _row_norm(x).double().add_(_lost(x))


def _row_norm(x: Tensor) -> Tensor:
    """As :func:`row_norm`, in some dtype, but for squares that underflow: each norm may be smaller by :func:`_lost`."""
    dtype = compute_dtype(x)
    if x.shape[-1] > SUM_BLOCK or x.stride(-1) != 1:
        return row_sq_norm(x).sqrt_()
    return torch.linalg.vector_norm(x if x.dtype is dtype else x.to(dtype), dim=-1)


def _lost(x: Tensor) -> float:
    return (x.shape[-1] * bounds.smallest_normal(compute_dtype(x))) ** 0.5


def row_sq_norm(x: Tensor) -> Tensor:
    """Squared L2 norms along the last dimension, in fp64; no fp32 sum is longer than ``SUM_BLOCK`` terms."""
    x = x.to(compute_dtype(x))
    width = x.shape[-1]
    if width <= SUM_BLOCK:
        if x.dim() == 3 and x.shape[0] > 0 and x.stride(1) == 1 < x.stride(2):
            # Channels first. vector_norm is 20 times slower there than a sum over the slow dimension.
            squares = torch.empty_like(x[0])
            return torch.stack([torch.mul(x_n, x_n, out=squares).sum(-1) for x_n in x]).double()
        return torch.linalg.vector_norm(x, dim=-1).double().square_()
    whole = width - width % SUM_BLOCK
    blocks = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (-1, SUM_BLOCK)), dim=-1)
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


def sum_block(length: int) -> int:
    """Into blocks of how many terms a sum of ``length`` is cut whose error is to be small: the largest divisor up to
    64, or no cut where that is less than 8."""
    block = next(b for b in range(min(64, max(1, length)), 0, -1) if length % b == 0)
    return block if block >= 8 else length


def dense_sq_norm(blocks: Iterable[Tensor], error: Tensor | None = None) -> SquaredNorm:
    """‖v_n‖² of values (N, ...) that come in blocks of samples, at least one, each used while it is in the cache.

    Args:
        error: how far the values themselves may be off, in L2 norm, (N,).
    """
    squares = []
    for block in blocks:
        rows = _rows_of_entries(block)
        squares.append(row_sq_norm(rows))
    total = sum_blocks(squares[0] if len(squares) == 1 else torch.cat(squares))
    width, numel = min(rows.shape[-1], SUM_BLOCK), rows.shape[1] * rows.shape[2]
    return bounds.dense(total, width=width, numel=numel, dtype=compute_dtype(rows), error=error)


def _rows_of_entries(values: Tensor) -> Tensor:
    """(N, ...) as (N, rows, width). Rows of a kernel's 3 would be slow, longer sums than need be less exact."""
    width, dims = 1, values.dim()
    while dims > 1 and (dims == values.dim() or (width < 16 and width * values.shape[dims - 1] <= SUM_BLOCK)):
        dims -= 1
        width *= values.shape[dims]
    return values.reshape(values.shape[0], values.shape[1:dims].numel(), width)


def rank_one_sq_norm(activations: Tensor, backprops: Tensor) -> SquaredNorm:
    """T = 1 (or 0): ‖G_n‖² = ‖a_n‖²‖b_n‖²."""
    sq_a, sq_b = row_sq_norm(activations).sum(-1), row_sq_norm(backprops).sum(-1)
    dtype = compute_dtype(activations, backprops)
    return bounds.rank_one(sq_a, sq_b, d=activations.shape[-1], p=backprops.shape[-1], width=SUM_BLOCK, dtype=dtype)


class ProductError(NamedTuple):
    """How far :func:`grad_sample` may be from the exact G_n, in L2 norm: what it follows from, for several layers of
    one shape to be worked out together (:meth:`bound`)."""

    norm_a: Tensor
    norm_b: Tensor
    terms: tuple[float, float, float, float]
    """What the norms of a's and b's rows may have lost; the two numbers of ``bounds.direct_terms``."""

    @classmethod
    def of(cls, activations: Tensor, backprops: Tensor, kernel_chain: int | None = None) -> ProductError:
        """With ``kernel_chain``: the kernels', see :func:`bounds.direct_error`."""
        terms = bounds.direct_terms(
            positions=activations.shape[1],
            numel=activations.shape[2] * backprops.shape[2],
            dtype=compute_dtype(activations, backprops),
            kernel_chain=kernel_chain,
        )
        return cls(_row_norm(activations), _row_norm(backprops), (_lost(activations), _lost(backprops), *terms))

    def bound(self) -> Tensor:
        """(N,) fp64."""
        lost_a, lost_b, relative, least = self.terms
        row_products = (self.norm_a.double().add_(lost_a) * self.norm_b.double().add_(lost_b)).sum(-1)
        return row_products.mul_(relative).add_(least)


def direct_sq_norm(activations: Tensor, backprops: Tensor) -> SquaredNorm:
    """‖Σ_t b_nt a_ntᵀ‖² from G_n itself, formed in pieces that fit the workspace."""
    dtype = compute_dtype(activations, backprops)
    n, _, d = activations.shape
    p = backprops.shape[-1]
    totals = []
    row_bytes = dtype.itemsize * max(1, d)
    rows = max(1, min(p, WORKSPACE_BYTES // row_bytes))
    samples = max(1, WORKSPACE_BYTES // (row_bytes * rows))
    for i in range(0, n, samples):
        a, b = activations[i : i + samples], backprops[i : i + samples]
        squares = [row_sq_norm(grad_sample(a, b[..., j : j + rows])) for j in range(0, p, rows)]
        totals.append(sum_blocks(torch.cat(squares, dim=-1)))
    total = torch.cat(totals) if totals and p else activations.new_zeros(n, dtype=torch.float64)
    error = ProductError.of(activations, backprops).bound()
    return bounds.dense(total, width=min(d, SUM_BLOCK), numel=p * d, dtype=dtype, error=error)


def gram_sq_norm(activations: Tensor, backprops: Tensor) -> SquaredNorm:
    """‖G_n‖² = Σ_tt' (a_t·a_t')(b_t·b_t') over tiles of the lower triangle, with the sums its error bound needs."""
    dtype = compute_dtype(activations, backprops)
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    n, t, d = activations.shape
    norm_a, norm_b = row_norm(activations), row_norm(backprops)
    missing = -t % products.BATCH_INVARIANT_FROM
    if missing:  # rows of zeros, so that no tile is narrower than what products.batched needs
        activations, backprops = (F.pad(x, (0, 0, 0, missing)) for x in (activations, backprops))
        norm_a, norm_b = (F.pad(x, (0, missing)) for x in (norm_a, norm_b))
    sums = activations.new_zeros(4, n, dtype=torch.float64)
    t_padded = t + missing
    side = max(1, min(t_padded, bounds.GRAM_TILE))
    samples = max(1, WORKSPACE_BYTES // (3 * dtype.itemsize * side**2))
    for first in range(0, n, samples):
        s = slice(first, first + samples)
        for i in range(0, t_padded, side):
            for j in range(0, i + 1, side):
                r, c = slice(i, i + side), slice(j, j + side)
                a = gram_tile(activations[s, r], activations[s, c])
                b = gram_tile(backprops[s, r], backprops[s, c])
                tile_sums = _gram_tile_sums(a, b, norm_a[s, r], norm_a[s, c], norm_b[s, r], norm_b[s, c])
                # A tile off the diagonal stands for its mirror image too.
                sums[:, s] += tile_sums if i == j else 2 * tile_sums
    return bounds.gram(
        *sums,
        sum_a=norm_a.sum(-1),
        sum_b=norm_b.sum(-1),
        row_products=(norm_a * norm_b).sum(-1),
        shape=(t, d, backprops.shape[-1]),
        row=side,
        dtype=dtype,
    )


def gram_tile(x: Tensor, y: Tensor) -> Tensor:
    """x_n y_nᵀ, its inner products added in blocks (see bounds.gram)."""
    block = bounds.DOT_BLOCK
    out = products.batched(x[..., :block], y[..., :block].mT)
    for start in range(block, x.shape[-1], block):
        features = slice(start, start + block)
        products.batched(x[..., features], y[..., features].mT, add_to=out)
    return out


def _gram_tile_sums(a: Tensor, b: Tensor, a_row: Tensor, a_col: Tensor, b_row: Tensor, b_col: Tensor) -> Tensor:
    """(4, n): Σ a∘b, Σ ‖a‖‖a'‖|b|, Σ |a|‖b‖‖b'‖ and Σ |a||b| of one tile; rows in its dtype, their sums in fp64."""
    product = (a * b).sum(-1).double().sum(-1)
    a, b = a.abs_(), b.abs_()
    by_a = (b * a_col.to(b.dtype)[:, None, :]).sum(-1) * a_row
    by_b = (a * b_col.to(a.dtype)[:, None, :]).sum(-1) * b_row
    by_both = a.mul_(b).sum(-1).double()
    return torch.stack([product, by_a.sum(-1), by_b.sum(-1), by_both.sum(-1)])
