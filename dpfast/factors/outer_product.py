"""Gradients that are sums of outer products over positions: those of every linear map."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dpfast.arithmetic import AnyNorm, PairCalls, SquaredNorm, accumulating_dtype, are_plain, cost, lowered, ops
from dpfast.factors.dense import Dense, Factor, InBlocks
from dpfast.factors.runs import take


class OuterProduct:
    """``G_n = Σ_t b_nt a_ntᵀ`` of a parameter of shape (P, D).

    Args:
        activations: (N, ..., D); backprops: (N, ..., P). Kept, not copied; never written to.

    Attributes:
        of: the ``id`` of both, as they were given.
        calls: what is known of tensors like these, where kernels run; the same bits in less time.
    """

    keep_ratio: float | None = None  # see ``cost.keeps``
    calls: PairCalls | None = None
    _versions: tuple[int, int] | None = None

    def __init__(self, activations: Tensor, backprops: Tensor, *, where: object = "OuterProduct"):
        self.of = id(activations), id(backprops)
        self.activations, self.backprops = ops.as_rows(activations, backprops, where)
        self.shape = torch.Size((self.backprops.shape[-1], self.activations.shape[-1]))

    @classmethod
    def of_rows(cls, activations: Tensor, backprops: Tensor, calls: PairCalls | None = None) -> OuterProduct:
        """Of tensors (N, T, ·) that are known to fit."""
        found = cls.__new__(cls)
        found.calls = calls
        found.activations, found.backprops, found.of = activations, backprops, (0, 0)
        found.shape = torch.Size((backprops.shape[-1], activations.shape[-1]))
        return found

    def note_versions(self) -> None:
        """It waits, and what it stands for must not change meanwhile."""
        self._versions = self.activations._version, self.backprops._version

    @property
    def has_changed(self) -> bool:
        """Whether torch has counted a write to what it holds since :meth:`note_versions`."""
        now = self.activations._version, self.backprops._version
        return self._versions is not None and now != self._versions

    @property
    def num_samples(self) -> int:
        return self.activations.shape[0]

    def materialize(self, scale: float = 1.0) -> Tensor:
        return ops.grad_sample(self.activations, self.backprops, scale=scale)

    def sq_norm(self) -> SquaredNorm:
        return ops.certified_sq_norm(self.activations, self.backprops)

    def unfinished(self) -> AnyNorm | None:
        """What the norm follows from; None where that is no matter of this factor alone."""
        return ops.unfinished_norm(self.activations, self.backprops)

    def weighted_sum(self, coefficients: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As every factor's; in ``dtype``, rounded once to nearest, if one is given."""
        calls = self.calls
        excess = ops.sum_excess(self.activations, self.backprops) if calls is None else calls.excess
        coefficients = lowered(coefficients, 1.0 - excess) if excess else coefficients
        if calls is not None and are_plain(coefficients, self.activations):
            return calls.weighted_sum(self.activations, self.backprops, coefficients, dtype)
        return ops.weighted_sum(self.activations, self.backprops, coefficients, dtype=dtype)

    def materialized(self) -> Dense:
        return Dense(*ops.certified_grad_sample(self.activations, self.backprops))

    def kept(self) -> Factor:
        return self.written() if self.keeps else self

    def written(self) -> Factor:
        """The gradients, as :meth:`kept` keeps them."""
        blocks = ops.certified_blocks(self.activations, self.backprops)
        return self.materialized() if blocks is None else InBlocks(*blocks)

    def taken(self, rows: Tensor | slice, zeros: Tensor | None = None) -> OuterProduct:
        """Those samples alone, with zeros in the place of some of them."""
        tensors = [take(x, rows) for x in (self.activations, self.backprops)]
        if zeros is not None:
            tensors = [x.index_fill_(0, zeros.to(x.device), 0) for x in tensors]  # copies
        return OuterProduct(*tensors)

    def together(self, n: int) -> OuterProduct:
        """n samples, each of as many of these, one after the other."""
        return OuterProduct(*(x.unflatten(0, (n, -1)).flatten(1, 2) for x in (self.activations, self.backprops)))

    def apart(self) -> OuterProduct:
        """A sample of each position."""
        return OuterProduct(self.activations.flatten(0, 1), self.backprops.flatten(0, 1))

    @property
    def device(self) -> torch.device:
        return self.backprops.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of sums."""
        return accumulating_dtype(self.activations, self.backprops)

    @property
    def keeps(self) -> bool:
        """Whether :meth:`kept` writes the gradients."""
        return self.keeps_together(1)

    def keeps_together(self, k: int) -> bool:
        """The same of a sample made of k of these."""
        gradient, inputs = self.shape.numel() * self.dtype.itemsize, self.nbytes // max(1, self.num_samples)
        return cost.keeps(k * self.activations.shape[1], gradient, k * inputs, self.keep_ratio)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.activations.nbytes + self.backprops.nbytes
