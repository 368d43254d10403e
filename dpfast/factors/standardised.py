"""Gradients of a convolution's weight that was standardised before: ``v = (w - mean) · rstd`` by output channel.

With x̂ = v and D entries a channel, a sample's gradient is ``J s∘H_n`` for the gradient H_n of what the convolution
used, s = rstd · gain and ``J h = h - mean(h) - x̂ mean(h ∘ x̂)`` by channels: one linear map, the same for all samples.
So the clipped sum goes through it once, and norms follow from those of s∘H_n and from two numbers a channel,
``M = Σ h`` and ``Q = Σ h∘x̂``: ``‖J h‖² = ‖h‖² - Σ_p (M² + (2 - c₂) Q² - 2 c₁ M Q) / D`` with c₁ and c₂ the means of x̂
and x̂². Source: Qiao et al., Weight Standardization (2019), eq. 11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import (
    AnyNorm,
    SquaredNorm,
    StandardisedTerms,
    UnfinishedGram,
    UnfinishedStandardised,
    bounds,
    finished,
    is_traced,
    smallest_normal,
    sums,
    unfinished_norm,
)
from dpfast.factors.dense import Dense, Factor, InBlocks
from dpfast.factors.patch_product import PatchProduct

_SAME_ENTRIES = {
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "Unsqueeze", "Squeeze")
}
"""Nodes of autograd's behind which a tensor's entries are the same, in the same order."""


def standardised(factor: Factor, value: Tensor, source: Tensor) -> Factor | None:
    """The factor of ``source`` where ``value``, whose ``factor`` is given, is its standardised form and nothing else;
    None where autograd's graph between them says something else, or is not known."""
    if torch.is_grad_enabled():  # not within a backward pass
        with torch.no_grad():
            return standardised(factor, value, source)
    known = source.dtype == value.dtype and value.dtype in (torch.float32, torch.float64)
    if not (known and isinstance(factor, PatchProduct) and factor.num_samples):
        return None
    node: Any = _before(value.grad_fn)
    if node is None or node.name() != "NativeBatchNormBackward0" or not node._saved_training:
        return None
    (to_input, *others), weights = node.next_functions, node._saved_input
    leaf = getattr(_before(to_input[0]), "variable", None)
    if leaf is not source or source.shape != value.shape:
        return None
    for other, _ in others:
        if other is not None:
            return None
    if weights.shape[:2] != (1, factor.shape[0]) or weights.numel() != source.numel():
        return None
    channels, mean, rstd, gain = source.shape[0], node._saved_result1, node._saved_result2, node._saved_weight
    scaled = factor.with_scaled_rows(rstd if gain is None else rstd * gain)
    if gain is None and value.device.type == "cpu" and value.is_contiguous() and not is_traced():
        with_normal = None
        if factor.output is not None and not factor.keeps:
            output, rows = factor.output.flatten(2).contiguous(), scaled.rows.flatten(2).contiguous()
            with_normal, _ = sums.sums_of_products(output, rows)
        found = Standardised(scaled, value.detach().reshape(channels, -1), with_normal=with_normal)
        if found.is_of(rstd, node._saved_eps):
            return found
    return Standardised(scaled, (source.reshape(channels, -1) - mean[:, None]).mul_(rstd[:, None]))


def is_standardised(value: Tensor) -> bool:
    """Whether :func:`standardised` may know what was done to a weight."""
    node = _before(value.grad_fn)
    return node is not None and node.name() == "NativeBatchNormBackward0"


def _before(node: Any) -> Any:
    while node is not None and node.name() in _SAME_ENTRIES:
        ((node, _),) = node.next_functions
    return node


class _Gammas(NamedTuple):
    """What sums in blocks of so many entries are off, relatively: of ``_applied``'s means, of both moments together, of
    a mean square, and all that ``_applied`` rounds."""

    of_means: float
    of_moments: float
    of_square: float
    of_all: float


@lru_cache(maxsize=1024)
def _gammas(block: int, dtype: torch.dtype) -> _Gammas:
    one, two, four = (bounds.gamma(block + more, dtype) for more in (1, 2, 4))
    return _Gammas(two, one + four, four, 1.01 * (two + bounds.gamma(12, dtype)))


class _Sizes(NamedTuple):
    """Upper bounds.

    Attributes:
        largest: of every row's mean square of x̂. lean: of the magnitude of every row's mean of it, as computed.
        reach: of 1 and of ``‖x̂‖ / √D`` of any row.
        stretch: of ``‖J‖``: 1 where x̂ has mean 0 and mean square 1 or less, up to rounding.
        rounding: of what ``_applied`` rounds, relative to ``‖h‖``.
    """

    largest: Any
    lean: Any
    reach: Any
    stretch: Any
    rounding: Any


class Standardised:
    """``J h`` for the gradients h of another factor.

    Args:
        factor: of h, with as many rows as ``normal``.
        normal: x̂, (P, D).
        unfinished: what the norm of ``J h`` follows from, where it is known.
        with_normal: Q by sample and channel, (N, P) in fp64, where that is.
        off: at most so far are the moments from x̂'s, where that is.
    """

    def __init__(
        self,
        factor: PatchProduct | InBlocks,
        normal: Tensor,
        unfinished: UnfinishedStandardised | None = None,
        with_normal: Tensor | None = None,
        off: float | None = None,
    ):
        self.factor, self.normal, self.shape, self._with_normal = factor, normal, factor.shape, with_normal
        self._unfinished, self._off = unfinished, off
        self._gammas = _gammas(sums.sum_block(normal.shape[1]) or 1, normal.dtype)
        self._means: tuple[Tensor, Tensor] | None = None
        self._known: _Sizes | None = None

    @property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Means of x̂² and x̂, (P,) in fp64."""
        if self._means is None:
            square, mean = _two_sums(self.normal, self.normal.unsqueeze(0)).div_(self.normal.shape[1])[0].unbind()
            self._means = square, mean
        return self._means

    def is_of(self, rstd: Tensor, eps: float) -> bool:
        """Whether ``normal`` has the moments of x̂, mean 0 and mean square ``1 - eps · rstd²``: it may be x̂ and a number
        a row, or x̂ that something has written to past autograd (``.data``)."""
        square, mean = self._moments
        rstd = rstd.double()
        off = torch.addcmul(square, rstd, rstd, value=eps).sub_(1.0)
        self._off = torch.linalg.vector_norm(torch.stack((off, mean)), torch.inf).item()
        return self._off <= bounds.gamma(128, self.normal.dtype)  # not where one is NaN

    @property
    def num_samples(self) -> int:
        return self.factor.num_samples

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = self._applied(self.factor.materialize())
        return values.mul_(scale) if scale != 1.0 else values

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return self._applied(self.factor.weighted_sum(coefficients))

    def materialized(self) -> Dense:
        dense: Any = self.factor.materialized()  # of products, which have an error
        error = self._sizes.stretch * dense.error + self._sizes.rounding * dense.sq_norm().upper.sqrt()
        return Dense(self._applied(dense.values), error=error)

    def sq_norm(self) -> SquaredNorm:
        return finished(self.unfinished())

    def unfinished(self) -> UnfinishedStandardised:
        """What the norm follows from."""
        if self._unfinished is None:
            product: Any = self.factor
            self._unfinished = self._from_inputs(product, product.unfinished() or product.sq_norm())
        return self._unfinished

    def kept(self) -> Factor:
        if isinstance(self.factor, InBlocks) or not self.keeps:
            return self
        blocks, error = self.factor.in_blocks()
        held: list[Tensor] = []
        sums_of: list[Sequence[Tensor]] = []

        def watched() -> Iterator[Tensor]:
            for block in blocks:
                sums_of.extend(_sums_by_block(self.normal, block))
                held.append(block)
                yield block

        norm = unfinished_norm(watched())
        with_normal, plain = _added(sums_of, self.normal).unbind(1)
        far = self.normal.shape[1] ** 0.5 * self._sizes.reach
        relative = far * self._gammas.of_means
        found = self._without_means(norm, plain, with_normal, None, (relative, far * self._underflow(1.0)), error=error)
        return Standardised(InBlocks(held, error, norm._replace(error=error)), self.normal, found, off=self._off)

    @property
    def keeps(self) -> bool:
        """Whether :meth:`kept` writes gradients."""
        return isinstance(self.factor, InBlocks) or self.factor.keeps

    def _applied(self, values: Tensor) -> Tensor:
        """``J values``, (..., *shape); overwrites them."""
        values = values.contiguous()  # of channels last they come in that order
        rows = values.view(-1, *self.normal.shape)
        means = _two_sums(self.normal, rows).div_(rows.shape[-1]).to(rows.dtype).unsqueeze(-1)
        with_normal, plain = means.unbind(1)
        rows.sub_(plain).addcmul_(self.normal, with_normal, value=-1.0)
        return values

    def _from_inputs(self, product: PatchProduct, norm: AnyNorm) -> UnfinishedStandardised:
        """Of gradients that are not written: M is ``Σ_t b_t (Σ a_t)`` and Q is ``Σ_t b_t (a_t · x̂)``."""
        if isinstance(norm, UnfinishedGram):
            patches_norm, rows_norm = norm.totals[7:].sqrt().unbind()
        else:
            patches_norm, rows_norm = product.norms()
        positions, width, reach = product.rows.shape[2:].numel(), self.normal.shape[1], self._sizes.reach
        relative = width**0.5 * bounds.gamma_matmul(width + positions + 2, self.normal.dtype) * reach
        with_normal = product.row_products(self.normal) if self._with_normal is None else self._with_normal
        inputs, lost = (patches_norm * rows_norm, rows_norm), reach * self._underflow(width * positions)
        return self._without_means(norm, product.row_sums(), with_normal, inputs, (relative, lost))

    def _without_means(
        self,
        norm: AnyNorm,
        m: Tensor,
        q: Tensor,
        inputs: tuple[Tensor, Tensor] | None,
        off: tuple[Any, Any],
        error: Tensor | None = None,
    ) -> UnfinishedStandardised:
        """What ``‖J h‖²`` follows from, with M and Q by sample and channel, (N, P) in fp64.

        Args:
            norm: ``‖h‖²``. inputs: ‖a‖‖b‖ and ‖b‖, of gradients that are not written.
            off: how far M and Q may be, relative to that or to ``‖h‖``, and by underflow.
            error: how far h itself may be off, where ``norm`` does not say it.
        """
        (square, mean), width, sizes = self._moments, self.normal.shape[1], self._sizes
        sq_q = q.square()
        taken = torch.addcmul(m, mean, q, value=-2.0).mul_(m).add_(sq_q, alpha=2.0).addcmul_(sq_q, square, value=-1.0)
        none = taken.new_zeros(taken.shape[0])
        products, of_rows = (None, none) if inputs is None else inputs
        of_m, of_q = torch.linalg.vector_norm(m, dim=-1), torch.linalg.vector_norm(q, dim=-1)
        numbers = (taken.sum(-1).div_(width), of_m, of_q, none if error is None else error, of_rows)
        slop = 1.01 / width
        terms = StandardisedTerms(
            *off,
            moments=(sizes.largest + 1.0) * (self._gammas.of_moments * slop),
            sums=(sizes.largest + sizes.lean + 2.0) * (2.0 * slop),
            rounding=sizes.rounding,
            stretch=sizes.stretch,
        )
        return UnfinishedStandardised(norm, torch.stack(numbers), products, terms)

    @property
    def _sizes(self) -> _Sizes:
        if self._known is None:
            off, (square, mean), least = self._off, self._moments, smallest_normal(self.normal.dtype)
            largest: Any = (square.amax() if off is None else 1.0 + off) * (1.0 + 2.0 * self._gammas.of_square) + least
            lean: Any = torch.linalg.vector_norm(mean, torch.inf) if off is None else off
            stretch = _at_least_one(largest + 1.01 * lean + (1e-3 - 1.0))
            rounding = largest * self._gammas.of_all + self._gammas.of_all
            self._known = _Sizes(largest, lean, _at_least_one(largest**0.5), stretch, rounding)
        return self._known

    def _underflow(self, terms: float) -> float:
        return terms * self.normal.numel() * smallest_normal(self.normal.dtype)


def _at_least_one(x: Any) -> Any:
    return x.clamp(min=1.0) if isinstance(x, Tensor) else max(1.0, x)


def _two_sums(normal: Tensor, rows: Tensor) -> Tensor:
    """Q and M of gradients (n, P, D), (n, 2, P) in fp64, added in blocks, a sample at a time: x̂ is not copied."""
    if rows.numel() == 0:
        return rows.new_zeros(rows.shape[0], 2, rows.shape[1], dtype=torch.float64)
    return _added(_sums_by_block(normal, rows), normal)


def _sums_by_block(normal: Tensor, rows: Tensor) -> list[Sequence[Tensor]]:
    """Of each sample, one after the other."""
    rows = rows.contiguous()
    return list(map(sums.sums_of_blocks(normal), rows.unbind() if rows.shape[0] > 1 else [rows]))


def _added(blocks: Sequence[Sequence[Tensor]], normal: Tensor) -> Tensor:
    together = torch.stack([of_blocks for both in blocks for of_blocks in both])
    return together.view(len(blocks), 2, normal.shape[0], -1).sum(-1, dtype=torch.float64)
