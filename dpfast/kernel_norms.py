"""The kernels' sums, made into norms and their bounds; the one place that imports kernels, when they are first used."""

from __future__ import annotations

import importlib
from functools import lru_cache

import torch
from torch import Tensor

from dpfast import bounds
from dpfast.bounds import SquaredNorm

_TILE_SUM = 512  # a kernel sums a tile of at most 256 by 256 entries row by row, then the rows


@lru_cache(maxsize=1)
def import_kernels():
    """(the kernels package, None), or (None, why it cannot be used)."""
    try:
        return importlib.import_module("dpfast.kernels"), None
    except Exception as error:  # a broken Triton fails in many ways; each means the reference
        return None, f"{type(error).__name__}: {error}"


def sq_norm(activations: Tensor, backprops: Tensor, way: str) -> SquaredNorm:
    """The kernels' sums, made into a norm and its bound."""
    kernels, _ = import_kernels()
    (_, t, d), p = activations.shape, backprops.shape[-1]
    sq_a, sq_b = kernels.row_sq_norm(activations).double(), kernels.row_sq_norm(backprops).double()
    if way == "rank_one":
        return bounds.rank_one(sq_a.sum(-1), sq_b.sum(-1), d=d, p=p, width=max(d, p), dtype=torch.float32)
    norm_a, norm_b = sq_a.sqrt(), sq_b.sqrt()
    row_products = (norm_a * norm_b).sum(-1)
    if way == "direct":
        total = kernels.outer_norm(activations, backprops).sq_norm.double()
        error = bounds.direct_error(row_products, positions=t, numel=p * d, dtype=torch.float32, by_kernel=True)
        return bounds.dense(total, width=_TILE_SUM, numel=p * d, dtype=torch.float32, error=error)
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
        by_kernel=True,
    )
