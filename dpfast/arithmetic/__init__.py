"""How numbers are computed, and how far they may be off: tensors in, tensors out; nothing of modules or privacy.

Imports ``dpfast.kernels`` (lazily, in ``kernel_norms.py`` alone) and ``dpfast.errors``. ``ops`` has the verbs, over the
einsum path (``reference``, ``reference_norms``) or the kernels as ``backends`` chooses; ``bounds`` holds the constants
of the proofs (docs/bounds.md), ``cost`` those of the choice of way.
"""

from dpfast.arithmetic import bounds, buffers, cost, ops, products, reference, sums, unit_runs
from dpfast.arithmetic.backends import backend_report
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.finishing import AnyNorm, dense_sq_norm, finish, finished
from dpfast.arithmetic.kernel_calls import PairCalls, RowNormCalls, are_plain, calls_like
from dpfast.arithmetic.kernel_norms import UnitRuns, lookup_sq_norm, lookup_unit_sq_norm, weighted_side_by_side
from dpfast.arithmetic.noise import Noise, noise_way
from dpfast.arithmetic.patch_norms import unfinished_gram_of_patches
from dpfast.arithmetic.precision import (
    accumulating_dtype,
    exact_arithmetic,
    exact_convolutions,
    reduced_convolutions,
    reduced_products,
    smallest_normal,
    towards_zero,
)
from dpfast.arithmetic.products import product_report
from dpfast.arithmetic.reference_norms import gram_tile, rank_one_norm, unfinished_of_products
from dpfast.arithmetic.row_norms import RowNorms, lowered, taken_once
from dpfast.arithmetic.stacked_grams import UnfinishedGram
from dpfast.arithmetic.stacked_kernel_norms import KernelDirect, rows_in_order
from dpfast.arithmetic.stacked_norms import (
    NormsOfLayers,
    SumError,
    Unfinished,
    norm_terms,
    sum_bounds,
    sum_error_columns,
    sum_errors,
    unfinished_norm,
    unfinished_norms,
)
from dpfast.arithmetic.standardised_norms import StandardisedTerms, UnfinishedStandardised
from dpfast.arithmetic.streams import in_cuda_graph, stream_here
from dpfast.arithmetic.tracing import capturing, is_traced, operator, pinned

__all__ = [
    "AnyNorm",
    "KernelDirect",
    "Noise",
    "NormsOfLayers",
    "PairCalls",
    "RowNormCalls",
    "RowNorms",
    "SquaredNorm",
    "StandardisedTerms",
    "SumError",
    "Unfinished",
    "UnfinishedGram",
    "UnfinishedStandardised",
    "UnitRuns",
    "accumulating_dtype",
    "are_plain",
    "backend_report",
    "bounds",
    "buffers",
    "calls_like",
    "capturing",
    "cost",
    "dense_sq_norm",
    "exact_arithmetic",
    "exact_convolutions",
    "finish",
    "finished",
    "gram_tile",
    "in_cuda_graph",
    "is_traced",
    "lookup_sq_norm",
    "lookup_unit_sq_norm",
    "lowered",
    "noise_way",
    "norm_terms",
    "operator",
    "ops",
    "pinned",
    "product_report",
    "products",
    "rank_one_norm",
    "reduced_convolutions",
    "reduced_products",
    "reference",
    "rows_in_order",
    "smallest_normal",
    "stream_here",
    "sum_bounds",
    "sum_error_columns",
    "sum_errors",
    "sums",
    "taken_once",
    "towards_zero",
    "unfinished_gram_of_patches",
    "unfinished_norm",
    "unfinished_norms",
    "unfinished_of_products",
    "unit_runs",
    "weighted_side_by_side",
]
