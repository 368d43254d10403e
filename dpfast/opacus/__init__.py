"""dpfast inside Opacus: its samplers in the place of Opacus's own, and its modes in Opacus's engine.

One line more, nothing else changed:

    import dpfast.opacus
    dpfast.opacus.install()        # every Opacus model, also one that exists, uses dpfast's samplers

Or one line other, and clipping takes one backward pass:

    from dpfast.opacus import PrivacyEngine
"""

from dpfast.opacus import _supported  # noqa: F401  first: says what to install where Opacus is missing
from dpfast.opacus.bound_optimizers import OnePassOptimizer, TwoPassOptimizer
from dpfast.opacus.checkpoint import PrivateState
from dpfast.opacus.engine import PrivacyEngine
from dpfast.opacus.losses import ClippedLoss, ClippedLossTensor
from dpfast.opacus.optimizers import DPOptimizerFast
from dpfast.opacus.samplers import install, uninstall

__all__ = [
    "ClippedLoss",
    "ClippedLossTensor",
    "DPOptimizerFast",
    "OnePassOptimizer",
    "PrivacyEngine",
    "PrivateState",
    "TwoPassOptimizer",
    "install",
    "uninstall",
]
