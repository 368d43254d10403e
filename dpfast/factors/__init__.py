"""Factored gradients: small objects that stand for the N per-sample gradients of one parameter.

Each answers three questions, ``materialize``, ``sq_norm`` and ``weighted_sum``, without the N gradients being written
unless asked for (:class:`Factor`). A parameter that is used more than once has a list of them, which :func:`merge`
makes one. Imports ``arithmetic`` and below.
"""

from dpfast.factors.dense import Dense, Factor, channel_sum, row_sum
from dpfast.factors.folded import folded
from dpfast.factors.lookup import Lookup
from dpfast.factors.merge import merge
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.patch_product import PatchProduct
from dpfast.factors.reshaped import Blocks, Reshaped
from dpfast.factors.stacked import sq_norms
from dpfast.factors.waiting import Waiting

__all__ = [
    "Blocks",
    "Dense",
    "Factor",
    "Lookup",
    "OuterProduct",
    "PatchProduct",
    "Reshaped",
    "Waiting",
    "channel_sum",
    "folded",
    "merge",
    "row_sum",
    "sq_norms",
]
