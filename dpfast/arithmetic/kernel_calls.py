"""Kernels' calls for layers of one kind, of which shapes, dtypes and layouts are known: the same launches and the same
bits as of ``kernel_norms``, without the questions in between, which take a host longer than the launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import cost, kernel_norms, ops
from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.arithmetic.row_norms import taken_each, taken_once
from dpfast.arithmetic.stacked_kernel_norms import KernelDirect, KernelGram


def calls_like(name: str, **options: Any) -> Any:
    """A launcher's calls on tensors that are alike, see ``kernels.Like``."""
    kernels, _ = import_kernels()
    return kernels.Like(getattr(kernels, name), **options)


def are_plain(coefficients: Tensor, of: Tensor) -> bool:
    """Whether a launch may read these as they are: (N,) fp32, contiguous, where ``of`` (N, ...) is."""
    plain = type(coefficients) is Tensor and coefficients.dtype is torch.float32 and coefficients.is_contiguous()
    return plain and coefficients.shape == of.shape[:1] and coefficients.device == of.device


class RowNormCalls:
    """``ops.raw_row_norm`` of tensors (N, T, D) that are contiguous, of one dtype and device, and alike but for N."""

    def __init__(self, x: Tensor) -> None:
        self._take = calls_like("row_norm") if ops.takes_row_norms(x) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._take is None:
            return ops.raw_row_norm(x)[0]
        return taken_once(kernel_norms.take_row_norm, x, self._take)


class PairCalls:
    """What follows from pairs (N, T, D) and (N, T, P) for which kernels run, that are contiguous, of the same dtypes
    and device, and alike but for N.

    Args:
        a, b: such a pair.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        kernels, _ = import_kernels()
        (_, t, d), p = a.shape, b.shape[2]
        self._way, self.excess = cost.norm_way(t, d, p), ops.sum_excess(a, b)
        self._row_norms = calls_like("row_norm"), calls_like("row_norm")
        self._gram = kernels.Like(kernels.gram_partials, "row_norm_activations", "row_norm_backprops")
        self._kept = calls_like("outer_product", norm=True, row_products=True, partials=True)
        self._calls: dict[tuple[str, torch.dtype | None], Callable[..., Any]] = {}  # of sums, by what they are left in
        self._of_gram, self._of_direct = kernel_norms.terms_of(t, d, p)

    def unfinished(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> KernelGram | None:
        """``kernel_norms.unfinished`` of several pairs' samples, one pair's after the other's; None where it is to be
        asked for each."""
        if self._way != "gram" or len({a.shape[0] for a, _ in pairs}) > 1:
            return None
        take, (of_a, of_b) = kernel_norms.take_row_norm, self._row_norms
        norms_a = taken_each(take, [a for a, _ in pairs], of_a.each)
        norms_b = taken_each(take, [b for _, b in pairs], of_b.each)
        of_norms = zip(norms_a, norms_b, strict=True)
        partials = self._gram.each((a, b, *norms) for (a, b), norms in zip(pairs, of_norms, strict=True))
        together = [x[0] if len(x) == 1 else torch.cat(x) for x in (partials, norms_a, norms_b)]
        return KernelGram(together[0], (together[1], together[2]), self._of_gram, kernel_norms.add_rows)

    def kept(self, a: Tensor, b: Tensor) -> tuple[KernelDirect, Tensor]:
        """``kernel_norms.kept``."""
        left = self._kept(a, b)
        return KernelDirect(left.sq_norm, left.row_products, self._of_direct, kernel_norms.add_rows), left.grad_sample

    def weighted_rows(self, values: Tensor, c: Tensor, dtype: torch.dtype | None) -> Tensor:
        """``ops.weighted_values`` of what :meth:`kept` has written, (N, P, D); c as of :meth:`weighted_sum`."""
        n, p, d = values.shape
        total: Tensor = self._left_in(dtype, "weighted_rows")(values.view(1, n, p * d), c)
        return total.view(p, d)

    def weighted_sum(self, a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype | None) -> Tensor:
        """``ops.weighted_sum``; c as of :func:`are_plain`."""
        weight: Tensor = self._left_in(dtype, "weighted_sum")(a, b, c).weight
        return weight

    def _left_in(self, dtype: torch.dtype | None, name: str) -> Callable[..., Any]:
        """Calls of the launcher of sums, which are rounded to the dtype as they are written; None: not at all."""
        call = self._calls.get((name, dtype))
        if call is None:
            options = {} if dtype is None else {"out_dtype": dtype}
            call = self._calls[name, dtype] = calls_like(name, **options)
        return call
