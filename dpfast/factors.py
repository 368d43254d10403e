"""Factored gradients: small objects that stand for the N per-sample gradients of one parameter.

Each answers three questions, ``materialize``, ``sq_norm`` and ``weighted_sum``, without the N gradients being
written unless asked for. A parameter that is used more than once has a list of them (``merge.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dpfast import bounds, cost, kernel_norms, ops, reference
from dpfast.bounds import SquaredNorm
from dpfast.reference import ProductError

STACKED_BYTES = {"cpu": 2**16, "cuda": 2**20}
"""Factors of tensors of at most so many bytes are stacked for their norms: on a CPU more would not stay in the caches,
and new memory costs page faults; a GPU copies so many in less than a launch takes."""

STACKED_FACTORS = 64
"""The most that are stacked at once, which bounds the copies' memory."""


class Factor(Protocol):
    """What every factor answers. ``shape`` is the parameter's; N is the number of samples."""

    shape: torch.Size

    @property
    def num_samples(self) -> int:
        """N."""

    def materialize(self, scale: float = 1.0) -> Tensor:
        """``scale · G_n``, (N, *shape), fp32 or fp64, in fresh memory."""

    def sq_norm(self) -> SquaredNorm:
        """‖G_n‖² and its proven upper bound, (N,) fp64 each."""

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """``Σ_n c_n G_n`` of the parameter's shape; c_n = 0 drops sample n, whatever it holds."""

    def materialized(self) -> Dense:
        """The gradients written out, with how far they may be from the exact ones."""

    def kept(self) -> Factor:
        """The cheapest form to keep until the clipped sum (``cost.keeps``)."""


class OuterProduct:
    """``G_n = Σ_t b_nt a_ntᵀ`` of a parameter of shape (P, D).

    Args:
        activations: (N, ..., D); backprops: (N, ..., P). Kept, not copied; never written to.
    """

    def __init__(self, activations: Tensor, backprops: Tensor, *, where: object = "OuterProduct"):
        self.activations, self.backprops = ops.as_rows(activations, backprops, where)
        self.shape = torch.Size((self.backprops.shape[-1], self.activations.shape[-1]))

    @property
    def num_samples(self) -> int:
        return self.activations.shape[0]

    def materialize(self, scale: float = 1.0) -> Tensor:
        return ops.grad_sample(self.activations, self.backprops, scale=scale)

    def sq_norm(self) -> SquaredNorm:
        return ops.certified_sq_norm(self.activations, self.backprops)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return ops.weighted_sum(self.activations, self.backprops, coefficients)

    def materialized(self) -> Dense:
        return Dense(*ops.certified_grad_sample(self.activations, self.backprops))

    def kept(self) -> Factor:
        if not self.keeps:
            return self
        blocks = ops.certified_blocks(self.activations, self.backprops)
        return self.materialized() if blocks is None else InBlocks(*blocks)

    @property
    def keeps(self) -> bool:
        """Whether :meth:`kept` writes the gradients."""
        gradient = self.shape.numel() * ops.accumulating_dtype(self.activations, self.backprops).itemsize
        return cost.keeps(self.activations.shape[1], gradient, self.nbytes // max(1, self.num_samples))

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.activations.nbytes + self.backprops.nbytes


class Lookup:
    """Gradients of a table of rows: position t of sample n adds ``backprops[n, t]`` to row ``indices[n, t]``.

    Args:
        indices: (N, ...) integers in [0, num_embeddings).
        backprops: (N, ..., D).
        padding_idx: positions with this index add nothing.
    """

    def __init__(self, indices: Tensor, backprops: Tensor, num_embeddings: int, padding_idx: int | None = None):
        n, d = backprops.shape[0], backprops.shape[-1]
        positions = indices[0].numel() if n else 0
        self.indices = indices.reshape(n, positions)
        self.backprops = backprops.reshape(n, positions, d)
        self.padding_idx = padding_idx
        self.shape = torch.Size((num_embeddings, d))

    @property
    def num_samples(self) -> int:
        return self.indices.shape[0]

    def rows(self) -> Tensor:
        """Backprops in the accumulating dtype, with zeros at padding."""
        rows = self.backprops.to(reference.compute_dtype(self.backprops))
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((self.indices == self.padding_idx).unsqueeze(-1), 0.0)

    def _keys(self) -> Tensor:
        """One number per (sample, row of the table), (N·T,)."""
        first = torch.arange(self.num_samples, device=self.indices.device) * self.shape[0]
        return (self.indices + first.unsqueeze(-1)).flatten()

    def materialize(self, scale: float = 1.0) -> Tensor:
        rows = self.rows()
        out = rows.new_zeros(self.num_samples * self.shape[0], self.shape[1])
        out.index_add_(0, self._keys(), rows.flatten(0, 1), alpha=scale)
        return out.view(self.num_samples, *self.shape)

    def segments(self) -> tuple[Tensor, Tensor]:
        """The gradient's non-zero rows: (values (N·T, D), their sample (N·T,)), unused places zero.

        Equal (sample, index) pairs are brought together by a stable sort, so a sample's sums are added in the
        order of its positions whatever batch it stands in. Memory: N·T·D, never N·V·D.
        """
        rows = self.rows()
        keys, order = self._keys().sort(stable=True)
        new_segment = torch.ones_like(keys, dtype=torch.bool)
        new_segment[1:] = keys[1:] != keys[:-1]
        segment = new_segment.cumsum(0) - 1
        values = rows.new_zeros(keys.numel(), self.shape[1])
        values.index_add_(0, segment, rows.flatten(0, 1)[order])
        sample = keys.new_zeros(keys.numel())
        sample[segment] = keys // self.shape[0]
        return values, sample

    def sq_norm(self) -> SquaredNorm:
        if ops.choose_backend("auto", self.backprops.device, reference.compute_dtype(self.backprops)) == "triton":
            return kernel_norms.lookup_sq_norm(self.indices, self.backprops, self.padding_idx)
        values, sample = self.segments()
        dtype = values.dtype
        total = values.new_zeros(self.num_samples, dtype=torch.float64)
        total.index_add_(0, sample, reference.row_sq_norm(values))
        numel = self.indices.shape[1] * self.shape[1]
        width = min(self.shape[1], reference.SUM_BLOCK)
        return bounds.dense(total, width=width, numel=numel, dtype=dtype, error=self._error())

    def _error(self) -> Tensor:
        """How far the summed rows may be from the exact ones, in L2 norm."""
        rows = self.rows()
        row_sums = reference.row_norm(rows).sum(-1)
        positions, width = rows.shape[1:]
        return bounds.chain_error(row_sums, terms=positions, numel=positions * width, dtype=rows.dtype)

    def materialized(self) -> Dense:
        return Dense(self.materialize(), error=self._error())

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        rows = self.rows()
        c = coefficients.to(rows.dtype)[:, None, None]
        scaled = (rows * c).masked_fill(c == 0, 0.0)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return torch.ops.aten.embedding_dense_backward(scaled, self.indices, self.shape[0], padding, False)

    def kept(self) -> Factor:
        return self


class Dense:
    """Gradients as they are.

    Args:
        values: (N, *shape). Kept, not copied; never written to.
        error: how far ``values`` may be from the exact gradients, in L2 norm, (N,) fp64, or what it follows from; None:
            not at all.
        norm: their norms, where these are known already.
    """

    def __init__(self, values: Tensor, error: Tensor | ProductError | None = None, norm: SquaredNorm | None = None):
        self.values = values
        self._error = error
        self._norm = norm
        self.shape = values.shape[1:]

    @property
    def num_samples(self) -> int:
        return self.values.shape[0]

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = self.values.to(reference.compute_dtype(self.values))
        return values * scale if scale != 1.0 or values is self.values else values

    def sq_norm(self) -> SquaredNorm:
        return self._norm or reference.dense_sq_norm([self.values], self.error)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return reference.weighted_rows([self.values], coefficients)

    @property
    def error(self) -> Tensor | None:
        """(N,) fp64."""
        if isinstance(self._error, ProductError):
            self._error = self._error.bound()
        return self._error

    def likeness(self) -> tuple[list[Tensor], Hashable] | None:
        """The tensors that dense factors are stacked by, and what they must have in common; None where the norm is
        known."""
        if self._norm is not None:
            return None
        if isinstance(self._error, ProductError):
            return [self.values, self._error.norm_a, self._error.norm_b], self._error.terms
        return [self.values] if self._error is None else [self.values, self._error], None

    @classmethod
    def stacked(cls, factors: Sequence[Dense]) -> Dense:
        """One factor with the samples of all, which are alike."""
        tensors = [torch.cat(parts) for parts in zip(*(f.likeness()[0] for f in factors), strict=True)]
        values, *error = tensors
        terms = factors[0].likeness()[1]
        if terms is not None:
            return cls(values, error=ProductError(*error, terms))
        return cls(values, *error)

    def materialized(self) -> Dense:
        return self

    def kept(self) -> Factor:
        return self


class InBlocks:
    """Gradients as they are, in blocks of samples: their norms are taken while a block is in the cache, and nothing is
    copied together.

    Args:
        blocks: (n, *shape) each, at least one.
        error: how far they may be from the exact gradients, in L2 norm, (N,) fp64.
    """

    def __init__(self, blocks: Iterable[Tensor], error: Tensor):
        self.blocks: list[Tensor] = []
        self.error = error

        def keeping() -> Iterator[Tensor]:
            for block in blocks:
                self.blocks.append(block)
                yield block

        self._norm = reference.dense_sq_norm(keeping(), error)
        self.shape = self.blocks[0].shape[1:]

    @property
    def num_samples(self) -> int:
        return len(self.error)

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = torch.cat(self.blocks)
        return values.mul_(scale) if scale != 1.0 else values

    def sq_norm(self) -> SquaredNorm:
        return self._norm

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return reference.weighted_rows(self.blocks, coefficients)

    def materialized(self) -> Dense:
        return Dense(self.materialize(), error=self.error, norm=self._norm)

    def kept(self) -> Factor:
        return self


def sq_norms(factors: Sequence[Factor]) -> list[SquaredNorm]:
    """Every factor's ``sq_norm()``, the same bits; small ones of one shape (biases, small layers) in one go.

    A sample's numbers do not depend on the batch that it stands in, so several factors may stand in one.
    """
    norms: dict[int, SquaredNorm] = {}
    alike: dict[Hashable, list[int]] = {}
    for i, factor in enumerate(factors):
        alike.setdefault(_likeness(factor) or i, []).append(i)
    groups = [
        all_of[k : k + STACKED_FACTORS] for all_of in alike.values() for k in range(0, len(all_of), STACKED_FACTORS)
    ]
    for members in groups:
        if len(members) == 1:
            norms[members[0]] = factors[members[0]].sq_norm()
            continue
        together = _stacked([factors[i] for i in members]).sq_norm()
        parts = zip(*(x.unflatten(0, (len(members), -1)) for x in together), strict=True)
        norms.update(zip(members, map(SquaredNorm._make, parts), strict=True))
    return [norms[i] for i in range(len(factors))]


def _likeness(factor: Factor) -> Hashable:
    """What factors that are stacked have in common; None for one that is not."""
    terms: Hashable = None
    if isinstance(factor, Dense):
        found = factor.likeness()
        if found is None:
            return None
        tensors, terms = found
    elif isinstance(factor, OuterProduct):
        tensors = [factor.activations, factor.backprops]
    else:
        return None
    most = STACKED_BYTES.get(tensors[0].device.type, 0)
    if factor.num_samples == 0 or any(x.nbytes > most or not x.is_contiguous() for x in tensors):
        return None
    return (type(factor), terms, *((x.shape, x.dtype, x.device) for x in tensors))


def _stacked(factors: Sequence[Dense] | Sequence[OuterProduct]) -> Factor:
    """One factor with the samples of all."""

    if isinstance(factors[0], Dense):
        return Dense.stacked(factors)
    return OuterProduct(*(torch.cat([getattr(f, name) for f in factors]) for name in ("activations", "backprops")))


def row_sum(backprops: Tensor) -> Dense:
    """The gradients of a bias: ``g_n = Σ_t b_nt`` from backprops (N, ..., P)."""
    rows = backprops.flatten(1, -2) if backprops.dim() > 2 else backprops.unsqueeze(1)
    if rows.shape[1] == 1:
        return Dense(rows.squeeze(1).to(reference.compute_dtype(rows)))
    sums = reference.row_norm(rows).sum(-1)
    error = bounds.chain_error(sums, terms=rows.shape[1], numel=rows.shape[2], dtype=reference.compute_dtype(rows))
    return Dense(reference.bias_grad_sample(rows), error=error)


def channel_sum(backprops: Tensor, row_norms: Tensor, sums: Tensor | None = None) -> Dense:
    """The gradients of a bias by channel: ``g_n = Σ_t b_nct`` from contiguous backprops (N, C, T) and their norms over
    T, (N, C). The error follows from ``Σ_t |b_nct| <= √T ‖b_nc‖``.

    Args:
        sums: the g_n, where they are known, added in blocks of ``reference.sum_block``.
    """
    block = reference.sum_block(backprops.shape[2])
    error = bounds.gamma(block + 1, backprops.dtype) * backprops.shape[2] ** 0.5 * row_norms
    if sums is None:
        blocks = backprops.unflatten(2, (-1, block)) if block else backprops.unsqueeze(2)
        sums = blocks.sum(-1).sum(-1, dtype=torch.float64)
    return Dense(sums.to(backprops.dtype), error=error.norm(dim=1))
