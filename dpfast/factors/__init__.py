"""Factored gradients: small objects that stand for the N per-sample gradients of one parameter.

Each answers three questions, ``materialize``, ``sq_norm`` and ``weighted_sum``, without the N gradients being written
unless asked for (:class:`Factor`). A parameter that is used more than once has a list of them, which :func:`merge`
makes one. Imports ``arithmetic`` and below.
"""

from dpfast.factors import unit_ops  # noqa: F401  # its operations are found by name
from dpfast.factors.alike import Alike, Numbers
from dpfast.factors.dense import Again, Dense, Factor, channel_sum, row_sum, row_sum_in_blocks, weighted_together
from dpfast.factors.folded import folded
from dpfast.factors.in_turn import InTurn
from dpfast.factors.kernel_recipe import KernelRecipe
from dpfast.factors.lookup import Lookup
from dpfast.factors.merge import merge
from dpfast.factors.of_experts import OfExperts
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.patch_product import PatchProduct, keeps_gradients
from dpfast.factors.pinned import pin
from dpfast.factors.ragged import Ragged, by_unit
from dpfast.factors.recipe import Recipe
from dpfast.factors.remembered import Remembered
from dpfast.factors.reshaped import Blocks, Reshaped, parts_of
from dpfast.factors.runs import Runs
from dpfast.factors.runs_in_graph import RunsInGraph
from dpfast.factors.stacked import added_up, norms_of_kinds, norms_or_unfinished, sq_norms, total_sq_norm
from dpfast.factors.standardised import Standardised, is_standardised, standardised
from dpfast.factors.waiting import Waiting, wait_as_factors

__all__ = [
    "Again",
    "Alike",
    "Blocks",
    "Dense",
    "Factor",
    "InTurn",
    "KernelRecipe",
    "Lookup",
    "Numbers",
    "OfExperts",
    "OuterProduct",
    "PatchProduct",
    "Ragged",
    "Recipe",
    "Remembered",
    "Reshaped",
    "Runs",
    "RunsInGraph",
    "Standardised",
    "Waiting",
    "added_up",
    "by_unit",
    "channel_sum",
    "folded",
    "is_standardised",
    "keeps_gradients",
    "merge",
    "norms_of_kinds",
    "norms_or_unfinished",
    "parts_of",
    "pin",
    "row_sum",
    "row_sum_in_blocks",
    "sq_norms",
    "standardised",
    "total_sq_norm",
    "wait_as_factors",
    "weighted_together",
]
