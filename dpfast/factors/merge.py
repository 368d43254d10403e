"""A parameter that is used more than once: one factor for the sum of several, cross terms included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, accumulating_dtype, bounds, gram_tile, reference, smallest_normal, sums
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.ragged import Ragged, by_unit, on_common_rows
from dpfast.factors.runs import Runs


def merge(factors: Sequence[Factor]) -> Factor:
    """One factor that stands for the sum of several of the same parameter.

    Outer products are joined along T and lookups along their positions; a lookup beside anything else (a tied
    embedding and its head) stays a lookup, see :class:`Tied`; what remains is written out and added.
    """
    if len(factors) == 1:
        return factors[0]
    sums_of_rows = [f for f in factors if hasattr(f, "together") or isinstance(f, Ragged)]
    if any(isinstance(f, Ragged) for f in sums_of_rows):
        rows, runs = on_common_rows(sums_of_rows)
        one = Ragged(merge(rows), runs)
        others = [f for f in factors if f not in sums_of_rows]
        return _added([*others, one]) if others else one
    lookups = [f for f in factors if isinstance(f, Lookup)]
    products = [f for f in factors if isinstance(f, OuterProduct)]
    others = [f for f in factors if not isinstance(f, (Lookup, OuterProduct))]
    if others:
        rest: Dense | OuterProduct = _added([*others, *products])
    elif products:
        activations, backprops = ([getattr(f, name) for f in products] for name in ("activations", "backprops"))
        rest = OuterProduct(_concatenate(activations), _concatenate(backprops))
    else:
        return _joined(lookups)
    return Tied(_joined(lookups), rest) if lookups else rest


class Tied:
    """A lookup and another factor of the same table, as in a tied embedding and language-model head.

    Maths:
        ``‖L + G‖² = ‖L‖² + ‖G‖² + 2⟨L, G⟩`` with ``⟨L, G⟩ = Σ_t β_t · G[i_t]`` for a lookup of rows i_t with
        gradients β_t; for an outer product, ``G[i_t] = Σ_s b_s[i_t] a_s`` without G being written.

    Cost:
        2·T·S·D FLOPs a sample for T lookups and S positions, and a workspace as the other norms'.
    """

    def __init__(self, lookup: Lookup, other: OuterProduct | Dense):
        self.lookup = lookup
        self.other: Any = other  # an OuterProduct wherever this one is taken by rows
        self.shape = lookup.shape

    def by_unit(self, runs: Runs) -> Factor:
        """See :func:`ragged.by_unit`."""
        return merge([by_unit(use, runs) for use in self.uses])

    @property
    def uses(self) -> tuple[Lookup, Any]:
        return self.lookup, self.other

    @property
    def num_samples(self) -> int:
        return self.lookup.num_samples

    def materialize(self, scale: float = 1.0) -> Tensor:
        return self.lookup.materialize(scale) + self.other.materialize(scale)

    def materialized(self) -> Dense:
        return _added([self.lookup, self.other])

    def kept(self) -> Factor:
        return self

    def taken(self, rows: Tensor | slice) -> Tied:
        """Those samples alone."""
        return Tied(self.lookup.taken(rows), self.other.taken(rows))

    def together(self, n: int) -> Tied:
        """n samples, each of as many of these, one after the other."""
        return Tied(self.lookup.together(n), self.other.together(n))

    @property
    def device(self) -> torch.device:
        return self.lookup.device

    @property
    def dtype(self) -> torch.dtype:
        """Of sums."""
        return torch.promote_types(self.lookup.dtype, self.other.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.lookup.nbytes + self.other.nbytes

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return self.lookup.weighted_sum(coefficients) + self.other.weighted_sum(coefficients)

    def sq_norm(self) -> SquaredNorm:
        one, two = self.lookup.sq_norm(), self.other.sq_norm()
        cross, error = self._cross()
        value = (one.value + two.value + 2.0 * cross).clamp(min=0.0)
        upper = one.upper + two.upper + 2.0 * (cross + error)
        # By the triangle inequality too, which is the closer one where the cross term's error is large.
        upper = torch.minimum(upper, (one.upper.sqrt() + two.upper.sqrt()).square() * (1.0 + 2.0**-40))
        return SquaredNorm(value, torch.maximum(upper, value))

    def _cross(self) -> tuple[Tensor, Tensor]:
        """⟨L, G⟩ as computed, and how far it may be from the exact one; (N,) fp64 each."""
        rows, indices = self.lookup.rows(), self.lookup.indices
        if isinstance(self.other, Dense):
            return _cross_with_values(rows, indices, self.other, self.lookup.sq_norm().upper.sqrt())
        n, t, _ = rows.shape
        s = self.other.activations.shape[1]
        samples = max(1, reference.WORKSPACE_BYTES // (3 * rows.element_size() * max(1, s * t)))
        parts = []
        for i in range(0, n, samples):
            j = slice(i, i + samples)
            parts.append(_cross_with_product(rows[j], indices[j], self.other.activations[j], self.other.backprops[j]))
        if not parts:
            return (rows.new_zeros(0, dtype=torch.float64),) * 2
        cross, error = zip(*parts, strict=True)
        return torch.cat(cross), torch.cat(error)


def _cross_with_values(rows: Tensor, indices: Tensor, other: Dense, size: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t β_t · v[i_t] for values v (N, V, D) that are themselves off by ``other.error``; ``size`` bounds ‖L‖."""
    dtype = accumulating_dtype(rows, other.values)
    picked = other.values.gather(1, indices.unsqueeze(-1).expand_as(rows)).to(dtype)
    cross = sums.sum_blocks((picked * rows).sum(-1).double())
    sizes = sums.row_norm(picked) * sums.row_norm(rows)
    d = rows.shape[-1]
    error = bounds.chain_error(
        sizes.sum(-1),
        terms=d + 1 + bounds.summed_after(indices.shape[1], dtype),
        numel=indices.shape[1] ** 2,
        dtype=dtype,
    )
    return cross, error if other.error is None else error + size * other.error


def _cross_with_product(rows: Tensor, indices: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t Σ_s b_s[i_t] (β_t · a_s)."""
    dtype = accumulating_dtype(rows, a, b)
    rows, a = rows.to(dtype), a.to(dtype)
    (_, t, d), s = rows.shape, a.shape[1]
    picked = b.mT.gather(1, indices.unsqueeze(-1).expand(-1, -1, s)).to(dtype)  # (N, T, S)
    products = gram_tile(rows, a)  # β_t · a_s
    cross = (picked * products).sum(-1).double().sum(-1)
    norm_rows, norm_a = sums.row_norm(rows), sums.row_norm(a)
    by_size = torch.einsum("nts,nt,ns->n", picked.abs().double(), norm_rows, norm_a)
    by_product = (picked.abs() * products.abs()).sum(-1).double().sum(-1)
    dots = bounds.gamma_matmul(bounds.blocked_terms(d, bounds.DOT_BLOCK) + 1, dtype)
    error = 1.01 * (dots * by_size + bounds.gamma(s + 3 + bounds.summed_after(t, dtype), dtype) * by_product)
    return cross, error + 4.0 * s * t * d * smallest_normal(dtype) * (
        1.0 + picked.abs().sum((1, 2), dtype=torch.float64)
    )


def _joined(lookups: Sequence[Lookup]) -> Lookup:
    """Lookups one after the other; padding that only some of them have becomes rows of zeros."""
    first = lookups[0]
    indices = torch.cat([f.indices for f in lookups], dim=1)
    if all(f.padding_idx == first.padding_idx for f in lookups):
        return Lookup(indices, _concatenate([f.backprops for f in lookups]), first.shape[0], first.padding_idx)
    return Lookup(indices, _concatenate([f.rows() for f in lookups]), first.shape[0])


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Along T, in the narrowest dtype that holds all of them exactly."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return torch.cat([t.to(dtype) for t in tensors], dim=1)


def _added(factors: Sequence[Factor]) -> Dense:
    """All gradients written out and added, with the error bounds of the parts and of the additions."""
    parts = [f.materialized() for f in factors]
    total = parts[0].values.to(accumulating_dtype(parts[0].values), copy=True)
    for part in parts[1:]:
        total += part.values
    norms: Any = sum(part.sq_norm().upper.sqrt() for part in parts)
    error = bounds.chain_error(norms, terms=len(parts), numel=total[:1].numel(), dtype=total.dtype)
    return Dense(total, error=sum((p.error for p in parts if p.error is not None), start=error))
