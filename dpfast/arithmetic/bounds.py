"""Upper bounds of norms that were computed in floating point (derivations: docs/bounds.md).

A norm that comes out too small would let a sample pass under-clipped and break the privacy promise, so every
squared norm travels with an upper bound of the exact one, and clip factors are taken from the bound. Notation:
``u`` is the unit roundoff of the dtype that accumulates, ``γ(n) = n·u / (1 - n·u)`` bounds the relative error of a
sum of n products in *any* order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1),
``S = Σ_t ‖a_t‖‖b_t‖``. Arguments and results are fp64 tensors of shape (N,), so what is added here is exact
enough that :data:`_SLOP` covers it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic.precision import reduced_products, smallest_normal, unit_roundoff

CHAIN_BLOCK = 256
"""Positions that the reference adds up in one product before it starts a new partial sum."""


DOT_BLOCK = 512
"""Features that the reference adds up in one product of its Gram matrices before it starts a new partial sum."""


GRAM_TILE = 128
"""Positions per side of a tile of the Gram matrices; also bounds the length of one row's sum. The kernels have tiles of
16 to 128, the smallest that hold T where T is short."""


TENSOR_CORE = 4.0
"""How much longer a sum on tensor cores counts: they align 16 products and the accumulator to the largest and cut
off (not round) what falls below its 24 bits, at most 2.2 times the error of a rounded sum of the same length
(docs/bounds.md); the rest is margin."""


_SLOP = 1.01
"""Covers the rounding in the error terms themselves, which are small to begin with."""


_REDUCED_PRECISION = 2.0**-7
"""Relative error of one product where the user lets fp32 products run in TF32 or bf16 (8 bits kept)."""


class SquaredNorm(NamedTuple):
    """‖G_n‖² as computed and an upper bound of the exact value, both (N,) in fp64."""

    value: Tensor
    upper: Tensor


def fp64_slop(added: int, more: int = 4) -> float:
    """What a sum of so many upper bounds is multiplied with, added in fp64 one after another: a rounding takes at most
    2⁻⁵³ of it away.

    Args:
        more: roundings beside these, with one for what all of them make together (their second-order terms).
    """
    return 1.0 + (added + more) * 2.0**-53


def gamma(terms: float, dtype: torch.dtype) -> float:
    """γ(n): relative error bound of a sum of ``terms`` products, relative to the sum of their magnitudes."""
    error = terms * unit_roundoff(dtype)
    if error >= 0.5:
        return float("inf")
    return error / (1.0 - error)


def gamma_matmul(terms: float, dtype: torch.dtype) -> float:
    """γ of a matrix product by torch, which a global switch may run in less than fp32's precision."""
    return _gamma_matmul(terms, dtype, _is_reduced(dtype))


def _gamma_matmul(terms: float, dtype: torch.dtype, reduced: bool) -> float:
    return gamma(terms, dtype) + (_REDUCED_PRECISION if reduced else 0.0)


def _is_reduced(dtype: torch.dtype) -> bool:
    """Whether a product in that dtype may be, by a global switch: asked each time."""
    return dtype != torch.float64 and reduced_products() > 0.0


def blocked_terms(terms: int, block: int) -> int:
    """The longest chain of additions where ``terms`` terms are added in blocks, then block by block."""
    return min(terms, block) + -(-terms // block)


def dense(total: Tensor, *, width: int, numel: Any, dtype: torch.dtype, error: Tensor | None = None) -> SquaredNorm:
    """Bound of ‖v‖² from its computed value.

    Args:
        total: computed sum of squares (N,), fp64; no sum in ``dtype`` longer than ``width`` terms.
        numel: entries of v, an int, or of each, (N,).
        error: how far (in L2 norm) v itself may be from the exact gradient, (N,).
    """
    relative, least = dense_terms(width=width, numel=numel, dtype=dtype)
    exact = relative * total + least
    if error is not None:
        exact = (exact.sqrt() + error).square()
    return SquaredNorm(total, exact * (1.0 + 2.0**-40))


def dense_terms(*, width: int, numel: Any, dtype: torch.dtype) -> tuple[float, Any]:
    """The two numbers of :func:`dense`: relative to the total, and what underflow can hide."""
    relative = 1.0 / (1.0 - gamma(width + 4, dtype))
    return relative, numel * smallest_normal(dtype) * relative


def chain_error(row_sums: Tensor, *, terms: int, numel: int, dtype: torch.dtype) -> Tensor:
    """``‖v̂ − v‖ ≤ γ·Σ_t ‖v_t‖`` for v = Σ_t v_t of ``numel`` entries, in chains of ``terms`` additions in any order."""
    relative, least = chain_terms(terms=terms, numel=numel, dtype=dtype)
    return relative * row_sums + least


def chain_terms(*, terms: int, numel: int, dtype: torch.dtype, operations: int | None = None) -> tuple[float, float]:
    """The two numbers of :func:`chain_error`: relative to the sum of norms, and what underflow can hide.

    Args:
        operations: that may underflow, an entry; ``terms`` unless given.
    """
    lost = (terms if operations is None else operations) * smallest_normal(dtype)
    return _SLOP * gamma(terms, dtype), lost * numel**0.5


def chains_error(row_sums: Tensor, *, terms: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """:func:`chain_error` where each chain has a length of its own, (N,) whole numbers."""
    error = terms * unit_roundoff(dtype)
    relative = torch.where(error < 0.5, error / (1.0 - error), torch.inf).double()
    return _SLOP * relative * row_sums + terms * (smallest_normal(dtype) * numel**0.5)


def summed_after(terms: int, dtype: torch.dtype) -> int:
    """What a chain in ``dtype`` is longer by where its result is one of ``terms`` numbers that are then added in fp64:
    fp64's own chains are no shorter for it, and those of fp32 as good as exact."""
    return terms if dtype == torch.float64 else 0


def kernel_terms(terms: int, chain: int) -> float:
    """As :func:`blocked_terms`, for a kernel that adds ``chain`` terms in a tensor core, then chain by chain."""
    return TENSOR_CORE * min(terms, chain) + -(-terms // chain)


def run_error(sq_products: Tensor, *, positions: int, numel: int, dtype: torch.dtype) -> Tensor:
    """``‖Ĝ − G‖ ≤ u/(1 − Tu)·s`` for a table's rows, each a sum of some of T positions.

    Args:
        sq_products: ``s² = Σ_v m_v² k_v Σ_t ‖b_t‖²`` over rows v, each a sum of k_v positions, which m_v additions
            round, (N,).
        numel: entries of all positions.
    """
    relative, least = run_terms(positions=positions, numel=numel, dtype=dtype)
    return relative * sq_products.sqrt() + least


def run_terms(*, positions: int, numel: int, dtype: torch.dtype) -> tuple[float, float]:
    """The two numbers of :func:`run_error`: relative to s, and what underflow can hide."""
    return _SLOP * (gamma(positions, dtype) / positions), positions * smallest_normal(dtype) * numel**0.5


def direct_error(
    row_products: Tensor, *, positions: int, numel: int, dtype: torch.dtype, kernel_chain: int | None = None
) -> Tensor:
    """``‖Ĝ − G‖ ≤ γ·S`` for G = Σ_t b_t a_tᵀ.

    The reference adds in blocks of :data:`CHAIN_BLOCK` positions, then block by block; a kernel in chains of
    ``kernel_chain`` on tensor cores, then chain by chain.
    """
    relative, least = direct_terms(positions=positions, numel=numel, dtype=dtype, kernel_chain=kernel_chain)
    return relative * row_products + least


def direct_terms(
    *, positions: int, numel: int, dtype: torch.dtype, kernel_chain: int | None = None
) -> tuple[float, float]:
    """The two numbers of :func:`direct_error`: relative to S, and what underflow can hide."""
    if kernel_chain is None:
        error = gamma_matmul(blocked_terms(positions, CHAIN_BLOCK), dtype)
    else:
        error = gamma(kernel_terms(positions, kernel_chain), dtype)
    return _SLOP * error, 2.0 * positions * smallest_normal(dtype) * numel**0.5


def rank_one(sq_a: Tensor, sq_b: Tensor, *, d: int, p: int, width: int, dtype: torch.dtype) -> SquaredNorm:
    """Bound of ‖a‖²‖b‖² from computed squared norms of rows of ``d`` and ``p`` entries."""
    upper_a = dense(sq_a, width=min(d, width), numel=d, dtype=dtype).upper
    upper_b = dense(sq_b, width=min(p, width), numel=p, dtype=dtype).upper
    # The product of two squares may be below all numbers of fp64, where the norm itself is not.
    return SquaredNorm(sq_a * sq_b, upper_a * upper_b * (1.0 + 2.0**-40) + smallest_normal(torch.float64))


def gram(
    product: Tensor,
    by_a: Tensor,
    by_b: Tensor,
    by_both: Tensor,
    *,
    sum_a: Tensor,
    sum_b: Tensor,
    row_products: Tensor,
    shape: tuple[Any, int, int],
    row: int,
    dtype: torch.dtype,
    kernel_chain: int | None = None,
    added: int = 0,
) -> SquaredNorm:
    """Bound of Σ_tt' (a_t·a_t')(b_t·b_t') from its computed value.

    ``|q̂ − q| ≤ γ_D Σ‖a_t‖‖a_t'‖|B̂| + γ_P Σ|Â|‖b_t‖‖b_t'‖ + γ_row Σ|Â||B̂| + γ_D γ_P S²`` with the computed Gram
    matrices Â and B̂, plus what underflow can hide.

    Args:
        product, by_a, by_b, by_both: the computed q̂ and the three sums, in this order, (N,).
        sum_a, sum_b: Σ_t ‖a_t‖ and Σ_t ‖b_t‖, (N,).
        row_products: S, (N,).
        shape: (T, D, P); T may be each one's own, (N,).
        row: the longest sum over products of Gram entries that was taken in ``dtype``.
        kernel_chain: the Gram matrices come from tensor cores, in chains of so many features; None for the reference.
        added: an entry of Â is the sum of so many that came from fewer features, of the reference alone.
    """
    of_a, of_b, of_both, of_products, by_b_alone, by_a_alone, least = gram_terms(
        shape, row=row, dtype=dtype, kernel_chain=kernel_chain, added=added
    )
    error = of_a * by_a + of_b * by_b + of_both * by_both + of_products * row_products.square()
    error = error + (by_a_alone * sum_a.square() + by_b_alone * sum_b.square() + least)
    # The exact value is no less than 0 even where the computed one is.
    return SquaredNorm(product.clamp(min=0.0), product.clamp(min=0.0) + error)


def gram_terms(
    shape: tuple[Any, int, int], *, row: int, dtype: torch.dtype, kernel_chain: int | None = None, added: int = 0
) -> tuple[Any, ...]:
    """The numbers of :func:`gram`: what its three sums, S², (Σ‖b_t‖)² and (Σ‖a_t‖)² are multiplied by, and what is
    added."""
    t, d, p = shape
    if kernel_chain is None:
        gamma_d, gamma_p = _gram_gammas(d, p, dtype, added, _is_reduced(dtype))
    else:
        gamma_d, gamma_p = (gamma(kernel_terms(k, kernel_chain) + 1, dtype) for k in (d, p))
    tiles = summed_after(GRAM_TILE + (t // GRAM_TILE + 1) ** 2, dtype)
    lost = 2.0 * _SLOP * smallest_normal(dtype)
    terms = gamma_d, gamma_p, gamma(row + 3 + tiles, dtype), gamma_d * gamma_p
    return *(_SLOP * x for x in terms), d * lost, p * lost, 4.0 * t * t * lost


def gram_row_terms(d: int, p: int, *, dtype: torch.dtype, added: int = 0) -> tuple[float, float]:
    """What a row's computed square, an entry of one of the reference's Gram matrices, is multiplied by and what is
    added for an upper bound of the exact one."""
    largest = max(_gram_gammas(d, p, dtype, added, _is_reduced(dtype)))
    relative = (1.0 + 2.0**-40) / (1.0 - largest) if largest < 0.5 else float("inf")
    return relative, 2.0 * (max(d, p) + added) * smallest_normal(dtype) * relative


@lru_cache(maxsize=4096)
def _gram_gammas(d: int, p: int, dtype: torch.dtype, added: int, reduced: bool) -> tuple[float, float]:
    """Of an entry of each of the reference's Gram matrices."""
    return (
        _gamma_matmul(blocked_terms(d, DOT_BLOCK) + 1 + added, dtype, reduced),
        _gamma_matmul(blocked_terms(p, DOT_BLOCK) + 1, dtype, reduced),
    )
