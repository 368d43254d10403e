"""The opaque operations of :mod:`dpfast.factors.runs_in_graph`: the eager factors, where ids have values."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfast.arithmetic import accumulating_dtype, exact_arithmetic
from dpfast.factors.dense import Dense
from dpfast.factors.lookup import Lookup
from dpfast.factors.merge import merge
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.ragged import Ragged, added_by_unit
from dpfast.factors.runs_in_graph import runs_of


@torch.library.custom_op("dpfast::unit_sq_norm", mutates_args=())
def unit_sq_norm(
    indices: Tensor | None,
    rows: Tensor | None,
    activations: Tensor | None,
    backprops: Tensor | None,
    num_embeddings: int,
    ids: Tensor,
    num_units: int,
) -> Tensor:
    """Value and bound, (2, U) fp64, of a lookup, an outer product, or their sum; see :class:`Ragged`."""
    uses: list[Lookup | OuterProduct] = []
    if indices is not None and rows is not None:
        uses.append(Lookup(indices, rows, num_embeddings))
    if activations is not None and backprops is not None:
        uses.append(OuterProduct(activations, backprops))
    with torch.no_grad(), exact_arithmetic():
        return torch.stack(Ragged(merge(uses), runs_of(ids, num_units)).sq_norm())


@unit_sq_norm.register_fake
def _(
    indices: Tensor | None,
    rows: Tensor | None,
    activations: Tensor | None,
    backprops: Tensor | None,
    num_embeddings: int,
    ids: Tensor,
    num_units: int,
) -> Tensor:
    return ids.new_empty(2, num_units, dtype=torch.float64)


@torch.library.custom_op("dpfast::added_by_unit", mutates_args=())
def added(values: Tensor, error: Tensor | None, ids: Tensor, num_units: int) -> list[Tensor]:
    """(U, ...) and how far they may be off, (U,) fp64; see :func:`ragged.added_by_unit`."""
    with torch.no_grad(), exact_arithmetic():
        runs = runs_of(ids, num_units)
        dense = added_by_unit(Dense(values, error=error), runs.ids_on(values.device), num_units, runs.counts)
        assert dense.error is not None
        return [dense.values, dense.error]


@added.register_fake
def _(values: Tensor, error: Tensor | None, ids: Tensor, num_units: int) -> list[Tensor]:
    dtype = accumulating_dtype(values)
    return [
        values.new_empty(num_units, *values.shape[1:], dtype=dtype),
        values.new_empty(num_units, dtype=torch.float64),
    ]
