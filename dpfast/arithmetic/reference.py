"""The einsum path: what is right, in any dtype up to fp64, and the CPU's path.

All functions take ``activations`` (N, T, D) and ``backprops`` (N, T, P) and work on the outer products
``G_n = Σ_t b_nt a_ntᵀ`` (P, D). They accumulate in fp32, or in fp64 where an input is fp64. A norm never holds
more than :data:`WORKSPACE_BYTES` of intermediate results (or one tile, where one tile is larger).

A sample's numbers never depend on the batch it stands in: the loops below go over samples or over blocks whose
size follows from T, D and P, and matrix products whose result could depend on the batch's size
(``products.batched``) are taken so that it does not. On a CPU: what cuBLAS does with a batch is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import opt_einsum
import torch
from torch import Tensor

from dpfast.arithmetic import bounds, buffers, products
from dpfast.arithmetic.precision import accumulating_dtype, towards_zero
from dpfast.arithmetic.tracing import is_traced

WORKSPACE_BYTES = 32 * 2**20
"""The most that a norm may hold in intermediate results at one time."""

KEPT_BLOCK = 2**20
"""The most bytes of kept gradients that are made at a time for each of torch's threads, but of one sample: they are
still in the cache when their norm is taken, and find room where activations have been freed."""

_SLICES, _SLICE = 64, 2048
"""Into how many slices a sum of rows is cut, at most and of so many entries at least: torch shares them out among its
threads, and a product of a row with a matrix is one thread's."""


@lru_cache(maxsize=4096)
def _expression(equation: str, *shapes: tuple[int, ...]) -> Callable[..., Tensor]:
    return opt_einsum.contract_expression(equation, *shapes)


def contract(equation: str, *operands: Tensor) -> Tensor:
    """``opt_einsum.contract``, its path planned once for each equation and shapes."""
    return _expression(equation, *(tuple(x.shape) for x in operands))(*operands, backend="torch")


def grad_sample(activations: Tensor, backprops: Tensor, *, scale: float = 1.0, to_keep: bool = False) -> Tensor:
    """``scale · Σ_t b_nt a_ntᵀ`` of shape (N, P, D), in fp32 or fp64; ``to_keep`` as in ``products.batched``."""
    if activations.dtype is not torch.float32 or backprops.dtype is not torch.float32:
        dtype = accumulating_dtype(activations, backprops)
        activations, backprops = activations.to(dtype), backprops.to(dtype)
    t = activations.shape[1]
    if t == 1:
        return (backprops.mT * scale) * activations if scale != 1.0 else backprops.mT * activations
    block = bounds.CHAIN_BLOCK  # short chains of additions: see bounds.direct_error
    if t <= block:
        return products.batched(backprops.mT, activations, scale=scale, to_keep=to_keep)
    out = products.batched(backprops[:, :block].mT, activations[:, :block], scale=scale, to_keep=to_keep)
    for start in range(block, t, block):
        positions = slice(start, start + block)
        products.batched(backprops[:, positions].mT, activations[:, positions], scale=scale, add_to=out)
    return out


def gradients(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """What gives ``Σ_t r_nt c_ntᵀ`` of one sample, of (N, T, R) and (N, T, C) with T > 0, on all threads."""
    if rows.dtype is not dtype or columns.dtype is not dtype:  # nobody needs all samples in more bits at once
        ones = rows.split(1), columns.split(1)
        return lambda n: gradients(ones[0][n].to(dtype), ones[1][n].to(dtype), dtype)(0)
    parts = (x.split(bounds.CHAIN_BLOCK, 1) for x in (rows, columns))
    products_of = [products.in_chunks(*part) for part in zip(*parts, strict=True)]
    if len(products_of) == 1:
        return products_of[0]

    def added(n: int) -> Tensor:
        first, *others = products_of
        out = first(n)
        for product in others:
            out.add_(product(n))
        return out

    return added


def grad_sample_blocks(activations: Tensor, backprops: Tensor) -> Iterator[Tensor]:
    """:func:`grad_sample` in blocks of samples of at most :data:`KEPT_BLOCK` bytes a thread, or of one sample: oneDNN,
    which takes them one by one anyway, then needs no copy."""
    (_, t, d), p, dtype = activations.shape, backprops.shape[2], accumulating_dtype(activations, backprops)
    n = max(1, KEPT_BLOCK * torch.get_num_threads() // max(1, d * p * dtype.itemsize))
    if t <= bounds.CHAIN_BLOCK and products.by_onednn(p, t, d, activations):
        n = 1
    for a, b in zip(activations.split(n), backprops.split(n), strict=True):
        yield grad_sample(a, b, to_keep=True)


def bias_grad_sample(backprops: Tensor, *, scale: float = 1.0) -> Tensor:
    """``scale · Σ_t b_nt`` of shape (N, P), in fp32 or fp64."""
    out = backprops.sum(dim=1, dtype=accumulating_dtype(backprops))
    return out.mul_(scale) if scale != 1.0 else out


def weighted_sum(activations: Tensor, backprops: Tensor, coefficients: Tensor) -> Tensor:
    """``Σ_n c_n Σ_t b_nt a_ntᵀ`` of shape (P, D); a sample with c_n = 0 adds exactly nothing, whatever it holds."""
    dtype = accumulating_dtype(activations, backprops)
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    c = towards_zero(coefficients, dtype)
    if drops_samples(c):
        activations, backprops = (_without_dropped(x, c) for x in (activations, backprops))
    return sum_of_all(activations, backprops, c)


def sum_of_all(activations: Tensor, backprops: Tensor, c: Tensor) -> Tensor:
    """:func:`weighted_sum` of tensors of the dtype that accumulates; a sample with c_n = 0 must hold finite numbers."""
    d, p = activations.shape[-1], backprops.shape[-1]
    dtype, c = c.dtype, c.view(-1, 1, 1)
    rows = c.numel() * activations.shape[1]
    if not is_traced() and products.by_onednn(p, rows, d, like=activations):
        return _by_onednn(backprops, activations, c)
    # The scaled copy is made of the smaller operand.
    if d <= p:
        activations = activations * c
    else:
        backprops = backprops * c
    activations, backprops = activations.reshape(rows, d), backprops.reshape(rows, p)
    if d < min(products.BATCH_INVARIANT_FROM, p):  # as in products
        return contract("rp,rd->dp", backprops, activations).mT.contiguous()
    if is_traced():
        return torch.mm(backprops.T, activations)
    # On a block of our own: glibc would give the memory of p.grad back at every step, and fault it in again.
    return torch.mm(backprops.T, activations, out=buffers.empty((p, d), dtype, activations.device))


def _by_onednn(backprops: Tensor, activations: Tensor, c: Tensor) -> Tensor:
    """``Σ_n c_n Σ_t b_nt a_ntᵀ``, the smaller of both scaled and transposed, a workspace at a time: oneDNN reads the
    other one as it is."""
    (_, t, d), p = activations.shape, backprops.shape[-1]
    small, large = (backprops, activations) if p <= d else (activations, backprops)
    c = c.expand(-1, t, -1).reshape(-1, 1)
    small, large = small.reshape(c.numel(), -1), large.reshape(c.numel(), -1)
    rows = max(1024, WORKSPACE_BYTES // (2 * small.element_size() * small.shape[1]))
    total: Any = None
    for some, weights, others in zip(small.split(rows), c.split(rows), large.split(rows), strict=True):
        part = products.onednn((some * weights).mT, others.mT)
        total = part if total is None else total.add_(part)
    return total if p <= d else total.mT.contiguous()


def weighted_sums(activations: Tensor, backprops: Tensor, coefficients: Tensor, layers: int) -> Tensor:
    """:func:`weighted_sum` of several layers, one's N samples after the other's, (L·N, T, ·) -> (L, P, D), in one
    product."""
    dtype = accumulating_dtype(activations, backprops)
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    c = towards_zero(coefficients, dtype)
    if drops_samples(c):
        by_sample, dropped = (layers, len(c), -1), (c == 0).view(-1, 1)  # each sample's rows one after the other
        activations, backprops = (
            x.reshape(by_sample).masked_fill(dropped, 0.0).view(x.shape) for x in (activations, backprops)
        )
    return sums_of_all(activations, backprops, c, layers)


def sums_of_all(activations: Tensor, backprops: Tensor, c: Tensor, layers: int) -> Tensor:
    """:func:`sum_of_all` of several layers, as :func:`weighted_sums`."""
    (n, t, d), p, by_sample = activations.shape, backprops.shape[-1], (layers, len(c), -1)
    if not is_traced() and products.by_onednn(p, n * t // layers, d, like=activations):
        each = zip(backprops.split(len(c)), activations.split(len(c)), strict=True)
        return torch.stack([_by_onednn(b, a, c.view(-1, 1, 1)) for b, a in each])
    if d <= p:
        activations = activations.reshape(by_sample) * c.view(-1, 1)
    else:
        backprops = backprops.reshape(by_sample) * c.view(-1, 1)
    return torch.bmm(backprops.reshape(layers, -1, p).mT, activations.reshape(layers, -1, d))


def weighted_values(values: Tensor, coefficients: Tensor) -> Tensor:
    """``Σ_n c_n v_n`` of several layers, (L, N, K) -> (L, 1, K); a sample with c_n = 0 adds exactly nothing."""
    dtype = accumulating_dtype(values)
    values, c = values.to(dtype), towards_zero(coefficients, dtype)
    if drops_samples(c):
        values = values.masked_fill((c == 0).unsqueeze(-1), 0.0)
    return torch.bmm(c.expand(values.shape[0], 1, -1), values)


def weighted_bias_sum(backprops: Tensor, coefficients: Tensor) -> Tensor:
    """``Σ_n c_n Σ_t b_nt`` of shape (P,)."""
    return weighted_rows([bias_grad_sample(backprops)], coefficients)


def weighted_rows(blocks: Sequence[Tensor], coefficients: Tensor) -> Tensor:
    """``Σ_n c_n v_n`` for values (N, ...) in blocks of samples, at least one; a sample with c_n = 0 adds exactly
    nothing, whatever it holds."""
    dtype, total = accumulating_dtype(blocks[0]), None
    weights = towards_zero(coefficients, dtype)
    masks = drops_samples(weights)
    if len(blocks) > 1 and not (masks or is_traced()) and all(v.shape[0] == 1 for v in blocks):
        return _weighted_one_by_one(blocks, weights)
    sizes, entries = [v.shape[0] for v in blocks], blocks[0].shape[1:].numel()
    slices = slices_of(entries) if blocks[0].device.type == "cpu" else 1
    for values, c, n in zip(blocks, weights.split(sizes), sizes, strict=True):
        values = values.to(dtype).reshape(n, entries)
        if masks:
            values = _without_dropped(values, c)
        total = sum_of_rows(values, c, slices, total)
    return total.view(blocks[0].shape[1:])  # type: ignore[union-attr]  # at least one block


def sum_of_rows(values: Tensor, c: Tensor, slices: int, total: Tensor | None = None) -> Tensor:
    """``Σ_n c_n v_n``, of (n, K) and (n,) in one dtype, K numbers in order, added to ``total`` where that is given. Who
    wants the bits of another such sum must take this: how it is asked chooses the routine that multiplies a row."""
    if slices > 1:
        n, entries = values.shape
        rows, c = values.view(n, slices, entries // slices).transpose(0, 1), c.expand(slices, 1, n)
        return torch.bmm(c, rows) if total is None else total.baddbmm_(c, rows)
    return torch.mv(values.mT, c) if total is None else total.addmv_(values.mT, c)


def _weighted_one_by_one(blocks: Sequence[Tensor], weights: Tensor) -> Tensor:
    """``Σ_n c_n v_n`` of blocks of one sample each: a number costs fewer calls than a product."""
    total: Any = None
    for value, c in zip(blocks, weights.tolist(), strict=True):
        value = value.to(weights.dtype)
        total = value * c if total is None else total.add_(value, alpha=c)
    return total.squeeze(0)


def slices_of(entries: int) -> int:
    """Into how many slices :func:`sum_of_rows` cuts rows of that length on a CPU."""
    slices = _SLICES
    while slices > 1 and (entries % slices or entries < slices * _SLICE):
        slices //= 2
    return slices


def drops_samples(coefficients: Tensor) -> bool:
    """Whether a coefficient may be 0. Reading them back is free on a CPU; elsewhere it would wait for the device, so
    there we always mask."""
    return coefficients.device.type != "cpu" or is_traced() or 0.0 in coefficients.tolist()


def _without_dropped(x: Tensor, coefficients: Tensor) -> Tensor:
    """``x`` (N, ...) with zeros where a sample's coefficient is 0: 0·inf would be NaN in the sum. Where what is dropped
    is finite (padding), on a CPU, nothing has to be copied."""
    dropped = coefficients == 0
    if x.device.type == "cpu" and not is_traced() and bool(x[dropped].sum().isfinite()):
        return x
    return x.masked_fill(dropped.view(-1, *[1] * (x.dim() - 1)), 0.0)
