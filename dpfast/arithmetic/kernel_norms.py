"""The kernels' sums, made into norms and their bounds; the one place that imports kernels, when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import bounds, precision
from dpfast.arithmetic.bounds import SquaredNorm

_TILE_SUM = 512  # a kernel sums a tile of at most 256 by 256 entries row by row, then the rows
_PARTS_SUM = 1024  # where T is split, the squares of so many entries of the added parts in one go


@lru_cache(maxsize=1)
def import_kernels() -> tuple[Any, str | None]:
    """(the kernels package, None), or (None, why it cannot be used)."""
    try:
        return importlib.import_module("dpfast.kernels"), None
    except Exception as error:  # a broken Triton fails in many ways; each means the reference
        return None, f"{type(error).__name__}: {error}"


def sq_norm(activations: Tensor, backprops: Tensor, way: str) -> SquaredNorm:
    """The kernels' sums, made into a norm and its bound."""
    kernels, _ = import_kernels()
    (_, t, d), p = activations.shape, backprops.shape[-1]
    if way == "direct" and groups(t, d, p):
        return grouped([(activations, backprops)])[0].norm
    sq_a, sq_b = kernels.row_sq_norm(activations).double(), kernels.row_sq_norm(backprops).double()
    if way == "rank_one":
        return bounds.rank_one(sq_a.sum(-1), sq_b.sum(-1), d=d, p=p, width=max(d, p), dtype=torch.float32)
    lost = precision.smallest_normal(torch.float32)  # of each square that underflows
    norm_a, norm_b = (sq_a + d * lost).sqrt(), (sq_b + p * lost).sqrt()
    row_products = (norm_a * norm_b).sum(-1)
    if way == "direct":
        total = kernels.outer_norm(activations, backprops).sq_norm.double()
        error = bounds.direct_error(
            row_products, positions=t, numel=p * d, dtype=torch.float32, kernel_chain=kernels.CHAIN
        )
        return bounds.dense(total, width=_PARTS_SUM, numel=p * d, dtype=torch.float32, error=error)
    sums = kernels.gram_norm(
        activations, backprops, row_norm_activations=norm_a.float(), row_norm_backprops=norm_b.float()
    )
    return bounds.gram(
        sums.sq_norm.double(),
        sums.bound_activations.double(),
        sums.bound_backprops.double(),
        sums.bound_product.double(),
        sum_a=norm_a.sum(-1),
        sum_b=norm_b.sum(-1),
        row_products=row_products,
        shape=(t, d, p),
        row=_TILE_SUM,
        dtype=torch.float32,
        kernel_chain=kernels.CHAIN,
    )


def lookup_sq_norm(indices: Tensor, backprops: Tensor, padding_idx: int | None) -> SquaredNorm:
    """‖G_n‖² of a table whose row ``indices[n, t]`` gets ``backprops[n, t]`` (N, T, D), and its bound."""
    function = _lookup_sq_norm_op if torch.compiler.is_compiling() else _lookup_sq_norm
    return SquaredNorm(*function(indices, backprops, padding_idx))


def _lookup_sq_norm(indices: Tensor, backprops: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    kernels, _ = import_kernels()
    _, t, d = backprops.shape
    rows = backprops if backprops.stride(-1) == 1 or d <= 1 else backprops.contiguous()
    sums = kernels.lookup_norm(indices, rows, padding_idx=padding_idx)
    error = bounds.run_error(sums.sq_products.double(), positions=max(1, t), numel=t * d, dtype=torch.float32)
    return bounds.dense(sums.sq_norm.double(), width=sums.width, numel=t * d, dtype=torch.float32, error=error)


_lookup_sq_norm_op = torch.library.custom_op("dpfast::lookup_sq_norm", _lookup_sq_norm, mutates_args=())


@_lookup_sq_norm_op.register_fake
def _(indices: Tensor, backprops: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    n = backprops.shape[0]
    return backprops.new_empty(n, dtype=torch.float64), backprops.new_empty(n, dtype=torch.float64)


class Direct(NamedTuple):
    """‖G_n‖², how far the computed G_n may be from the exact ones in L2 norm, (N,) fp64, and G (N, P, D) where kept."""

    norm: SquaredNorm
    error: Tensor
    grad_sample: Tensor | None


def groups(t: int, d: int, p: int) -> bool:
    """Whether pairs of this shape are for :func:`grouped`; the kernels must be there."""
    return import_kernels()[0].groups(t, d, p)


def grouped(pairs: Sequence[tuple[Tensor, Tensor]], *, keep: bool = False) -> list[Direct]:
    """The direct norms of many (activations, backprops), the launches as few as there are shapes and layouts."""
    kernels, _ = import_kernels()
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        layout = ((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in pair)
        alike.setdefault(tuple(layout), []).append(i)
    answers: dict[int, Direct] = {}
    for members in alike.values():
        activations, backprops = zip(*(pairs[i] for i in members), strict=True)
        sums = kernels.grouped_outer_norm(activations, backprops, keep=keep)
        (_, t, d), p = activations[0].shape, backprops[0].shape[-1]
        # Squares of less than the smallest normal number count as nothing in the kernel.
        products = (sums.sq_products.double() + sums.tiles * precision.smallest_normal(torch.float32)).sqrt()
        error = bounds.direct_error(products, positions=t, numel=p * d, dtype=torch.float32, kernel_chain=sums.chain)
        norms = bounds.dense(sums.sq_norm.double(), width=_TILE_SUM, numel=p * d, dtype=torch.float32, error=error)
        for j, i in enumerate(members):
            norm = SquaredNorm(norms.value[j], norms.upper[j])
            answers[i] = Direct(norm, error[j], None if sums.grad_sample is None else sums.grad_sample[j])
    return [answers[i] for i in range(len(pairs))]
