"""Gradients that are sums of outer products over positions: those of every linear map."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, accumulating_dtype, cost, ops
from dpfast.factors.dense import Dense, Factor, InBlocks


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
        excess = ops.sum_excess(self.activations, self.backprops)
        coefficients = coefficients * (1.0 - excess) if excess else coefficients
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
        gradient = self.shape.numel() * accumulating_dtype(self.activations, self.backprops).itemsize
        return cost.keeps(self.activations.shape[1], gradient, self.nbytes // max(1, self.num_samples))

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.activations.nbytes + self.backprops.nbytes
