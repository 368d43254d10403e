"""Kernels' calls for layers of one kind, of which shapes, dtypes and layouts are known: the same launches and the same
bits as of ``kernel_norms``, without the questions in between, which take a host longer than the launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import cost, kernel_norms, ops
from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.arithmetic.row_norms import taken_once
from dpfast.arithmetic.stacked_kernel_norms import KernelDirect, KernelGram, KernelRankOne


def calls_like(name: str, **options: Any) -> Callable[..., Any]:
    """A launcher's calls on tensors that are alike, see ``kernels.Like``."""
    kernels, _ = import_kernels()
    like: Callable[..., Any] = kernels.Like(getattr(kernels, name), **options)
    return like


class RowNormCalls:
    """``ops.raw_row_norm`` of tensors (N, T, D) that are contiguous, of one dtype and device, and alike but for N."""

    def __init__(self, x: Tensor) -> None:
        self._take = calls_like("row_norm") if ops.takes_row_norms(x) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._take is None:
            return ops.raw_row_norm(x)[0]
        return taken_once(kernel_norms.take_row_norm, x, self._take)


class PairCalls:
    """What follows from pairs (N, T, D) and (N, T, P) that are contiguous, of one device and their dtypes, and alike but
    for N, for which kernels run.

    Args:
        a, b: such a pair.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        kernels, _ = import_kernels()
        (_, t, d), p = a.shape, b.shape[2]
        self._way, self.excess = cost.norm_way(t, d, p, a.device), ops.sum_excess(a, b)
        self._row_norms = calls_like("row_norm"), calls_like("row_norm")
        self._gram = kernels.Like(kernels.gram_partials, "row_norm_activations", "row_norm_backprops")
        self._norm = calls_like("outer_norm", row_products=True, partials=True)
        self._kept = calls_like("outer_product", norm=True, row_products=True, partials=True)
        self._sums: dict[torch.dtype | None, Callable[..., Any]] = {}
        self._of_gram, self._of_direct = kernel_norms.terms_of(t, d, p)

    def unfinished(self, a: Tensor, b: Tensor) -> KernelDirect | KernelGram | KernelRankOne:
        """``kernel_norms.unfinished``."""
        if self._way == "gram":
            of_a, of_b = self._row_norms
            norms = taken_once(kernel_norms.take_row_norm, a, of_a), taken_once(kernel_norms.take_row_norm, b, of_b)
            return KernelGram(self._gram(a, b, *norms), norms, self._of_gram, kernel_norms.add_rows)
        if self._way == "direct":
            left = self._norm(a, b)
            return KernelDirect(left.sq_norm, left.row_products, self._of_direct, kernel_norms.add_rows)
        return kernel_norms.unfinished(a, b, self._way)

    def kept(self, a: Tensor, b: Tensor) -> tuple[KernelDirect, Tensor]:
        """``kernel_norms.kept``."""
        left = self._kept(a, b)
        return KernelDirect(left.sq_norm, left.row_products, self._of_direct, kernel_norms.add_rows), left.grad_sample

    def weighted_sum(self, a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype | None) -> Tensor:
        """``ops.weighted_sum``; c (N,) fp32, contiguous, on their device."""
        call = self._sums.get(dtype)
        if call is None:
            options = {} if dtype is None else {"out_dtype": dtype}
            call = self._sums[dtype] = calls_like("weighted_sum", **options)
        weight: Tensor = call(a, b, c).weight
        return weight
