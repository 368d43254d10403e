"""What every factor answers, and gradients as they are: in one tensor, or in blocks of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dpfast.arithmetic import (
    KernelDirect,
    PairCalls,
    SquaredNorm,
    SumError,
    Unfinished,
    accumulating_dtype,
    are_plain,
    bounds,
    dense_sq_norm,
    finished,
    is_traced,
    ops,
    reference,
    sums,
    towards_zero,
    unfinished_norm,
    weighted_side_by_side,
)
from dpfast.errors import InputError


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


Again = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]
"""``(activations, backprops, the latter's row norms) -> (values, the norms of their SumError)``, of (N, T, ·); none
where they are exact. Whatever else there is to know follows from shapes."""


class Dense:
    """Gradients as they are.

    Args:
        values: (N, *shape). Kept, not copied; never written to.
        error: how far ``values`` may be from the exact gradients, in L2 norm, (N,) fp64, or what it follows from, or
            what gives it: who wants neither a norm nor to keep the gradients does not need it. None: not at all. What a
            rule of others gives is looked at by :meth:`check_error`.
        norm: their norms, where these are known already, or what they follow from.

    Attributes:
        again: where nothing but what the layer caught makes it, what makes it; with :attr:`of`.
        whole: what makes it and others of its layer from what that caught and nothing else, and its place among them;
            of tensors that are contiguous and alike but for N.
        of: the ``id`` of the activations (0: not needed) and of the backprops (N, T, P); nothing is held for them.
        calls: what has written them, and knows how they are summed: the same bits in less time.
    """

    again: Again | None = None
    whole: tuple[Callable[[Tensor, Tensor], Sequence[Dense] | None], int] | None = None
    of: tuple[int, int] = (0, 0)
    calls: PairCalls | None = None

    def __init__(
        self,
        values: Tensor,
        error: Tensor | SumError | Callable[[], Tensor | SumError] | None = None,
        norm: SquaredNorm | KernelDirect | None = None,
    ):
        self.values = values
        self._error = error
        self._norm = norm
        self.shape = values.shape[1:]

    @property
    def num_samples(self) -> int:
        return self.values.shape[0]

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = self.values.to(accumulating_dtype(self.values))
        return values * scale if scale != 1.0 or values is self.values else values

    def sq_norm(self) -> SquaredNorm:
        return self.norm or dense_sq_norm([self.values], self.settled())

    def weighted_sum(self, coefficients: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As every factor's; in ``dtype``, rounded once to nearest, if one is given and that takes no call more."""
        if self.calls is not None and are_plain(coefficients, self.values):
            return self.calls.weighted_rows(self.values, coefficients, dtype)
        values = self.values.reshape(1, self.num_samples, self.shape.numel())
        return ops.weighted_values(values, coefficients).view(self.shape)

    @property
    def norm_is_known(self) -> bool:
        """Or what it follows from."""
        return self._norm is not None

    @property
    def norm(self) -> SquaredNorm | None:
        """Where it is known already."""
        if isinstance(self._norm, KernelDirect):
            self._norm = finished(self._norm)
        return self._norm

    @property
    def error(self) -> Tensor | None:
        """(N,) fp64."""
        error = self.settled()
        if isinstance(error, SumError):
            error = self._error = error.bound()
        return error

    def settled(self) -> Tensor | SumError | None:
        """The error, or what it follows from; nothing is held any longer for it to be given."""
        if self._error is not None and not isinstance(self._error, (Tensor, SumError)):
            self._error = self._error()
        return self._error

    def check_error(self) -> None:
        """Of a rule of somebody's own: an error below 0 would lower a bound that holds without it, and counts as none.

        Raises:
            InputError: it is no tensor (N,), nor what gives one.
        """
        error = self._error
        if callable(error):
            self._error = lambda: _not_negative(error(), self.num_samples)
        elif error is not None:
            self._error = _not_negative(error, self.num_samples)

    def unfinished(self) -> Unfinished | KernelDirect | None:
        """What the norm follows from; None where that is known."""
        if self._norm is None:
            return unfinished_norm([self.values], self.settled())
        return self._norm if isinstance(self._norm, KernelDirect) else None

    def materialized(self) -> Dense:
        return self

    def kept(self) -> Factor:
        self.settled()
        return self


def _not_negative(error: Tensor | SumError, n: int) -> Tensor | SumError:
    if isinstance(error, SumError):
        return error
    if not isinstance(error, Tensor) or error.numel() != n:
        given = tuple(error.shape) if isinstance(error, Tensor) else repr(error)
        raise InputError(f"the error of Dense is {given}, and not a tensor ({n},): give each sample's, in L2 norm")
    return error.reshape(n).clamp(min=0.0)


class InBlocks:
    """Gradients as they are, in blocks of samples: their norms are taken while a block is in the cache, and nothing is
    copied together.

    Args:
        blocks: (n, *shape) each, at least one.
        error: how far they may be from the exact gradients, in L2 norm, (N,) fp64 or what it follows from.
        unfinished: what their norms follow from, where that is known already.
    """

    def __init__(self, blocks: Iterable[Tensor], error: Tensor | SumError, unfinished: Unfinished | None = None):
        self.blocks: list[Tensor] = []

        def keeping() -> Iterator[Tensor]:
            for block in blocks:
                self.blocks.append(block)
                yield block

        self._error = error
        self._unfinished = unfinished_norm(keeping(), error) if unfinished is None else unfinished
        if unfinished is not None:
            self.blocks = list(blocks)
        self.shape = self.blocks[0].shape[1:]

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.blocks))

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = torch.cat(self.blocks)
        return values.mul_(scale) if scale != 1.0 else values

    def sq_norm(self) -> SquaredNorm:
        return finished(self._unfinished)

    def unfinished(self) -> Unfinished:
        """What the norm follows from."""
        return self._unfinished

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return reference.weighted_rows(self.blocks, coefficients)

    def materialized(self) -> Dense:
        return Dense(self.materialize(), error=self._error)

    def kept(self) -> Factor:
        return self


def weighted_together(
    factors: Sequence[Dense], coefficients: Tensor, rounded: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Their weighted sums, views of one tensor; all have as many samples, at least one, one dtype and one device.

    Args:
        rounded: what becomes of the sums, entry by entry.
    """
    values = [f.values if f.values.dim() == 2 else f.values.reshape(f.num_samples, -1) for f in factors]
    coefficients = coefficients.to(values[0].device)
    if is_traced() and values[0].dtype is torch.float32 and ops.runs_kernels(values[0]):
        total = weighted_side_by_side(values, towards_zero(coefficients, torch.float32))
    else:
        total = ops.weighted_values(torch.cat(values, 1).unsqueeze(0), coefficients)
    total = total if rounded is None else rounded(total)
    each = zip(total[0].split([v.shape[1] for v in values]), factors, strict=True)
    return [x if len(f.shape) == 1 else x.view(f.shape) for x, f in each]


def row_sum(backprops: Tensor) -> Dense:
    """The gradients of a bias: ``g_n = Σ_t b_nt`` from backprops (N, ..., P)."""
    rows = backprops.flatten(1, -2) if backprops.dim() > 2 else backprops.unsqueeze(1)
    if rows.shape[1] == 1:
        found = Dense(rows.squeeze(1).to(accumulating_dtype(rows)))
        found.again, found.of = _one_again, (0, id(backprops))
        return found

    def error() -> SumError:
        norms, lost = ops.raw_row_norm(rows)
        terms = bounds.chain_terms(terms=rows.shape[1], numel=rows.shape[2], dtype=accumulating_dtype(rows))
        return SumError((norms,), (lost,), *terms)

    found = Dense(reference.bias_grad_sample(rows), error=error)
    if backprops.dim() == 3:
        found.again, found.of = _summed_again, (0, id(backprops))
    return found


def _one_again(activations: Tensor, backprops: Tensor, row_norms: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    return backprops.squeeze(1).to(accumulating_dtype(backprops)), ()


def _summed_again(activations: Tensor, backprops: Tensor, row_norms: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    return reference.bias_grad_sample(backprops), (row_norms,)


def channel_sum(backprops: Tensor, row_norms: Tensor, totals: Tensor | None = None) -> Dense:
    """The gradients of a bias by channel: ``g_n = Σ_t b_nct`` from contiguous backprops (N, C, T) and their norms over
    T, (N, C). The error follows from ``Σ_t |b_nct| <= √T ‖b_nc‖``.

    Args:
        totals: the g_n, where they are known, added in blocks of ``sums.sum_block``.
    """
    block = sums.sum_block(backprops.shape[2])
    error = bounds.gamma(block + 1, backprops.dtype) * backprops.shape[2] ** 0.5 * row_norms
    if totals is None:
        blocks = backprops.unflatten(2, (-1, block)) if block else backprops.unsqueeze(2)
        totals = blocks.sum(-1).sum(-1, dtype=torch.float64)
    return Dense(totals.to(backprops.dtype), error=error.norm(dim=1))


def row_sum_in_blocks(rows: Tensor, row_norms: Tensor) -> Dense:
    """As :func:`row_sum` of rows (N, T, P) whose norms (N, T) are known, with a small error where T is long: no chain
    of fp32 is longer than ``sums.sum_block``."""
    block = sums.sum_block(rows.shape[1])
    totals = rows.unflatten(1, (-1, max(1, block))).sum(2).sum(1, dtype=torch.float64)
    error = bounds.chain_error(row_norms.sum(-1), terms=block + 1, numel=rows.shape[2], dtype=rows.dtype)
    return Dense(totals.to(rows.dtype), error=error)
