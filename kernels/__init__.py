"""Triton kernels: tensors in, tensors out.

A kernel knows nothing of modules, hooks or privacy. Each file holds one kernel and, below it, its launcher.
"""

from ._launch import run_class
from ._partials import sum_partials, sum_runs
from ._repeat import Like
from ._tiles import CHAIN
from .gram_norm import GramNormResult, gram_norm, gram_partials
from .grouped_norm import GroupedNormResult, grouped_outer_norm, groups
from .lookup_norm import LookupNormResult, lookup_norm
from .noise import add_noise
from .normalized_sum import WIDEST, NormalizedSumResult, normalized_sum
from .outer_norm import OuterNormResult, outer_norm
from .outer_product import OuterProductResult, outer_product
from .row_sq_norm import row_norm, row_sq_norm
from .weighted_rows import weighted_rows
from .weighted_sum import WeightedSumResult, weighted_sum

__all__ = [
    "CHAIN",
    "WIDEST",
    "GramNormResult",
    "GroupedNormResult",
    "Like",
    "LookupNormResult",
    "NormalizedSumResult",
    "OuterNormResult",
    "OuterProductResult",
    "WeightedSumResult",
    "add_noise",
    "gram_norm",
    "gram_partials",
    "grouped_outer_norm",
    "groups",
    "lookup_norm",
    "normalized_sum",
    "outer_norm",
    "outer_product",
    "row_norm",
    "row_sq_norm",
    "run_class",
    "sum_partials",
    "sum_runs",
    "weighted_rows",
    "weighted_sum",
]
