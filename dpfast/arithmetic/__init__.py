"""How numbers are computed, and how far they may be off: tensors in, tensors out; nothing of modules or privacy.

Imports ``dpfast.kernels`` (lazily, in ``kernel_norms.py`` alone) and ``dpfast.errors``. ``ops`` has the verbs, over the
einsum path (``reference``, ``reference_norms``) or the kernels as ``backends`` chooses; ``bounds`` holds the constants
of the proofs (docs/bounds.md), ``cost`` those of the choice of way.
"""

from dpfast.arithmetic import bounds, buffers, cost, ops, products, reference, sums
from dpfast.arithmetic.backends import backend_report
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.kernel_norms import lookup_sq_norm
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
from dpfast.arithmetic.reference_norms import ProductError, gram_tile
from dpfast.arithmetic.row_norms import RowNorms

__all__ = [
    "ProductError",
    "RowNorms",
    "SquaredNorm",
    "accumulating_dtype",
    "backend_report",
    "bounds",
    "buffers",
    "cost",
    "exact_arithmetic",
    "exact_convolutions",
    "gram_tile",
    "lookup_sq_norm",
    "ops",
    "product_report",
    "products",
    "reduced_convolutions",
    "reduced_products",
    "reference",
    "smallest_normal",
    "sums",
    "towards_zero",
]
