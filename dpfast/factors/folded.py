"""Gradients of rows made those of samples, where a model folds other things (windows, frames, choices) into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import accumulating_dtype, bounds, reference, sums
from dpfast.errors import InputError
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.lookup import Lookup
from dpfast.factors.of_experts import OfExperts
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.reshaped import Blocks, Reshaped
from dpfast.factors.runs import Runs


def folded(factor: Factor, n: int, *, rows_together: bool) -> Factor:
    """``G_n = Σ_k H_nk`` of n samples from the gradients H of k·n rows.

    Outer products and lookups are sums over positions: the rows become more of these, and nothing is written out.

    Args:
        rows_together: a sample's rows stand together; else the n samples come again and again.
    """

    def by_sample(x: Tensor) -> Tensor:
        return x.unflatten(0, (n, -1)) if rows_together else x.unflatten(0, (-1, n)).transpose(0, 1)

    if n == 0 or factor.num_samples == n:
        return factor
    if factor.num_samples % n:
        raise InputError(
            f"it saw {factor.num_samples} rows, which are not as many for each of the batch's {n} samples: how many "
            "depends on the data (experts, masked positions)"
        )
    if isinstance(factor, OfExperts):
        rows, k = torch.arange(factor.num_samples), factor.num_samples // n
        return factor.by_unit(Runs(rows // k if rows_together else rows % n, n))
    if isinstance(factor, OuterProduct):
        a, b = (by_sample(x).flatten(1, 2) for x in (factor.activations, factor.backprops))
        return OuterProduct(a, b)
    if isinstance(factor, Lookup):
        indices, backprops = by_sample(factor.indices), by_sample(factor.backprops)
        return Lookup(indices, backprops, factor.shape[0], factor.padding_idx)
    if isinstance(factor, Reshaped):
        return Reshaped(folded(factor.factor, n, rows_together=rows_together), factor.shape)
    if isinstance(factor, Blocks):
        return Blocks([folded(f, n, rows_together=rows_together) for f in factor.factors])
    dense = factor.materialized()
    rows = by_sample(dense.values.flatten(1) if dense.values.dim() > 1 else dense.values.unsqueeze(1))
    error: Any = bounds.chain_error(
        sums.row_norm(rows).sum(-1), terms=rows.shape[1], numel=rows.shape[2], dtype=accumulating_dtype(rows)
    )
    if dense.error is not None:
        error = error + by_sample(dense.error).sum(-1) * (1.0 + 2.0**-40)
    return Dense(reference.bias_grad_sample(rows).view(n, *torch.Size(dense.shape)), error=error)
