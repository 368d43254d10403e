"""The einsum path's three ways to a norm, each with its proven upper bound (``bounds``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfast.arithmetic import bounds, cost, products, reference, sums
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.finishing import finished
from dpfast.arithmetic.precision import accumulating_dtype, smallest_normal
from dpfast.arithmetic.row_norms import taken_once
from dpfast.arithmetic.stacked_grams import UnfinishedGram
from dpfast.arithmetic.stacked_norms import SumError, Unfinished


def rank_one_sq_norm(activations: Tensor, backprops: Tensor) -> SquaredNorm:
    """T = 1 (or 0): ‖G_n‖² = ‖a_n‖²‖b_n‖²."""
    return finished(unfinished_rank_one(activations, backprops))


def unfinished_rank_one(activations: Tensor, backprops: Tensor) -> Unfinished:
    """What that follows from. ``‖a‖‖b‖`` is at most the product of the computed norms, each with what underflow may
    have taken from it, which is the bound as a whole."""
    terms, dtype = [], accumulating_dtype(activations, backprops)
    for x in (activations, backprops):
        width = x.shape[-1]
        terms.append(bounds.dense_terms(width=min(width, sums.SUM_BLOCK), numel=width, dtype=dtype))
    (of_a, lost_a), (of_b, lost_b) = terms
    norms = (taken_once(sums.raw_row_norm, activations), taken_once(sums.raw_row_norm, backprops))
    lost, relative = ((lost_a / of_a) ** 0.5, (lost_b / of_b) ** 0.5), (of_a * of_b) ** 0.5 * (1.0 + 2.0**-40)
    error = SumError(norms, lost, relative, smallest_normal(torch.float64) ** 0.5)
    return Unfinished(rank_one_norm(*norms), 0, 0, dtype, error)


def rank_one_norm(norms_a: Tensor, norms_b: Tensor) -> Tensor:
    """(M, 1 or 0) each -> (M,) fp64."""
    return (norms_a.double() * norms_b).sum(-1)


def direct_sq_norm(activations: Tensor, backprops: Tensor) -> SquaredNorm:
    """‖Σ_t b_nt a_ntᵀ‖² from G_n itself, formed in pieces that fit the workspace."""
    return finished(unfinished_direct(activations, backprops))


def unfinished_of_products(values: Tensor, error: SumError | None = None) -> Unfinished:
    """:func:`unfinished_direct` from the products, (N, P, D), which may be used further."""
    p, d = values.shape[1:]
    norm = sums.norm_of_rows(sums.raw_row_norm(values))
    return Unfinished(norm, min(d, sums.SUM_BLOCK), p * d, values.dtype, error)


def unfinished_direct(activations: Tensor, backprops: Tensor, error: SumError | None = None) -> Unfinished:
    """What :func:`direct_sq_norm` follows from; ``error`` where it is known."""
    dtype = accumulating_dtype(activations, backprops)
    n, _, d = activations.shape
    p = backprops.shape[-1]
    if error is not None and 0 < n * p * d * dtype.itemsize <= reference.WORKSPACE_BYTES:
        return unfinished_of_products(reference.grad_sample(activations, backprops), error)
    row_bytes = dtype.itemsize * max(1, d)
    rows = max(1, min(p, reference.WORKSPACE_BYTES // row_bytes))
    samples = max(1, reference.WORKSPACE_BYTES // (row_bytes * rows))
    found = []
    for i in range(0, n, samples):
        a, b = activations, backprops
        if samples < n:
            a, b = a[i : i + samples], b[i : i + samples]
        pieces = [b] if rows == p else [b[..., j : j + rows] for j in range(0, p, rows)]
        norms = [sums.raw_row_norm(reference.grad_sample(a, piece)) for piece in pieces]
        if norms:
            found.append(sums.norm_of_rows(torch.cat(norms, dim=-1) if len(norms) > 1 else norms[0]))
    norm = torch.cat(found) if len(found) > 1 else found[0] if found else activations.new_zeros(n, dtype=torch.float64)
    error = error or SumError.of_products(activations, backprops)
    return Unfinished(norm, min(d, sums.SUM_BLOCK), p * d, dtype, error)


def gram_sq_norm(activations: Tensor, backprops: Tensor) -> SquaredNorm:
    """‖G_n‖² = Σ_tt' (a_t·a_t')(b_t·b_t')."""
    return finished(unfinished_gram(activations, backprops))


def unfinished_gram(activations: Tensor, backprops: Tensor) -> UnfinishedGram:
    """What that follows from: tiles of the lower triangle, with the sums its error bound needs."""
    dtype = accumulating_dtype(activations, backprops)
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    n, t, d = activations.shape
    missing = cost.gram_positions(t) - t
    if missing:  # rows of zeros, so that no tile is narrower than what products.batched needs
        activations, backprops = (F.pad(x, (0, 0, 0, missing)) for x in (activations, backprops))
    return gram_from_tiles(
        lambda s, r, c: gram_tile(gram_part(activations, s, r), None if r == c else gram_part(activations, s, c)),
        lambda s, r, c: gram_tile(gram_part(backprops, s, r), None if r == c else gram_part(backprops, s, c)),
        (n, t + missing, d, backprops.shape[-1]),
        like=activations,
    )


def gram_part(x: Tensor, samples: slice, rows: slice | None = None) -> Tensor:
    """``x[samples, rows]``; the whole without a slice, which takes its time."""
    if samples.start > 0 or samples.stop < x.shape[0]:
        x = x[samples]
    return x if rows is None or (rows.start == 0 and rows.stop >= x.shape[1]) else x[:, rows]


GramTiles = Callable[[slice, slice, slice], Tensor]
"""Of so many samples, rows and columns of their Gram matrices; in fresh memory."""


def gram_from_tiles(
    of_a: GramTiles,
    of_b: GramTiles,
    sizes: tuple[int, int, int, int],
    *,
    like: Tensor,
    together: int | None = None,
    added: int = 0,
) -> UnfinishedGram:
    """What ‖G_n‖² follows from, from tiles of the two Gram matrices.

    Args:
        sizes: (N, T, D, P).
        like: of the tiles' dtype and device.
        together: samples whose tiles fit the workspace, if it is not their size that says so.
        added: of how many parts an entry of a's is the sum beyond its blocks (see bounds.gram).
    """
    n, t, d, p = sizes
    dtype = like.dtype
    side = max(1, min(t, bounds.GRAM_TILE))
    samples = max(1, reference.WORKSPACE_BYTES // (3 * dtype.itemsize * side**2))
    samples = samples if together is None else min(samples, together)
    of_norms = bounds.gram_row_terms(d, p, dtype=dtype, added=added)
    found = []
    for first in range(0, n if t else 0, samples):
        s, norms = slice(first, first + samples), []
        total: Any = None
        for i in range(0, t, side):
            r = slice(i, i + side)
            a, b = of_a(s, r, r), of_b(s, r, r)
            norms.append(_row_norms(a, b, *of_norms))
            tile_sums = _gram_tile_sums(a, b, norms[-1], norms[-1], diagonal=True)
            total = tile_sums if total is None else total + tile_sums
        for i, of_rows in enumerate(norms):
            for j, of_columns in enumerate(norms[:i]):
                r, c = slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side)
                # It stands for its mirror image too.
                total[:4] += 2 * _gram_tile_sums(of_a(s, r, c), of_b(s, r, c), of_rows, of_columns)
        found.append(total)
    totals = torch.cat(found, 1) if len(found) > 1 else found[0] if found else like.new_zeros(9, n, dtype=torch.float64)
    return UnfinishedGram(totals, bounds.gram_terms((t, d, p), row=side, dtype=dtype, added=added))


def gram_tile(x: Tensor, y: Tensor | None = None) -> Tensor:
    """x_n y_nᵀ, or x_n x_nᵀ, its inner products added in blocks (see bounds.gram)."""
    (_, r, d), c, block = x.shape, (x if y is None else y).shape[1], bounds.DOT_BLOCK
    if d <= block:
        return products.batched(x, (x if y is None else y).mT)
    copied = products.by_onednn(r, block, c, x)  # of both, and of all samples, in one call
    out: Any = None
    for start in range(0, d, block):
        features = slice(start, start + block)
        rows, columns = x[..., features], None if y is None else y[..., features]
        if copied:
            rows, columns = rows.contiguous(), None if columns is None else columns.contiguous()
        columns = (rows if columns is None else columns).mT
        out = products.batched(rows, columns) if out is None else products.batched(rows, columns, add_to=out)
    return out


def _row_norms(a: Tensor, b: Tensor, relative: float, least: float) -> Tensor:
    """Upper bounds of ‖a_t‖ and ‖b_t‖, (2, n, T) fp64, from the diagonals of their Gram matrices."""
    squares = torch.stack([a.diagonal(dim1=1, dim2=2), b.diagonal(dim1=1, dim2=2)]).double()
    return squares.mul_(relative).add_(least).sqrt_()


def _gram_tile_sums(a: Tensor, b: Tensor, of_rows: Tensor, of_columns: Tensor, *, diagonal: bool = False) -> Tensor:
    """(4, n): Σ a∘b, Σ ‖a‖‖a'‖|b|, Σ |a|‖b‖‖b'‖ and Σ |a||b| of one tile; rows in its dtype, their sums in fp64. On the
    diagonal (9, n), as in ``UnfinishedGram``. ``of_rows``, ``of_columns``: (2, n, ·) norms of a's and b's."""
    norm_a, norm_b = of_columns.to(a.dtype).unsqueeze(2).unbind()
    rows = [(a * b).sum(-1)]
    a, b = a.abs_(), b.abs_()
    rows += [(b * norm_a).sum(-1), (a * norm_b).sum(-1), a.mul_(b).sum(-1)]
    by_row = torch.stack(rows).double()
    by_row[1:3].mul_(of_rows)
    if diagonal:
        by_row = torch.cat([by_row, of_rows, of_rows.prod(0, keepdim=True), of_rows.square()])
    return by_row.sum(-1)


SQ_NORMS = {"rank_one": rank_one_sq_norm, "gram": gram_sq_norm, "direct": direct_sq_norm}
"""By the names of ``cost.Way``."""
