"""What a model is wrapped in: which verb of a factor is called, and when.

``grad_sample_module`` materializes at once; ``fast_gradient_clipping`` takes norms and then clipped sums, in one pass
or two; ``per_sample_gradient_clipper`` and ``autograd_grad_sample`` have older interfaces. ``tapped_model``, ``steps``
and ``escaped_gradients`` are what they share; ``clippers`` says what is released. Imports ``rules`` and below.
"""

from dpfast.modes import autograd_grad_sample
from dpfast.modes.accumulation import (
    Left,
    held_by,
    left_in,
    not_noted,
    note_zeros,
    nothing_left,
    shares_noise,
    wait_for_noise,
)
from dpfast.modes.answers import answer_of
from dpfast.modes.blocks import UNITS
from dpfast.modes.clipped import Clipped, clip_to
from dpfast.modes.clippers import (
    AutomaticClipper,
    ClipFactors,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    check_threshold,
    safe_factors,
)
from dpfast.modes.escaped_gradients import Guards, check_parameters
from dpfast.modes.fast_gradient_clipping import GradSampleModuleFastGradientClipping
from dpfast.modes.gathered import is_small
from dpfast.modes.grad_sample_module import GradSampleModule, check_loss_reduction
from dpfast.modes.hooks import Hooks
from dpfast.modes.in_turn import clips_one_by_one, may_be_taken_in_turn, waits_for_its_turn
from dpfast.modes.memory_budget import held_one_by_one, plans, size_of, way_unwritten
from dpfast.modes.mixed_losses import expect_loss
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.modes.norm_samples import create_norm_sample
from dpfast.modes.per_sample_gradient_clipper import PerSampleGradientClipper
from dpfast.modes.rounding import Unrounded, is_taken_unrounded, rounding, takes_unrounded, unrounded, warn_of_16_bits
from dpfast.modes.steps import Step, check_valid
from dpfast.modes.tapped_model import TappedModel
from dpfast.modes.units import Units, UnitsInGraph

__all__ = [
    "UNITS",
    "AutomaticClipper",
    "ClipFactors",
    "Clipped",
    "ConstantFlatClipper",
    "ConstantPerLayerClipper",
    "DroppedSamples",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "Guards",
    "Hooks",
    "Left",
    "NormClipper",
    "PerSampleGradientClipper",
    "Step",
    "TappedModel",
    "Units",
    "UnitsInGraph",
    "Unrounded",
    "answer_of",
    "autograd_grad_sample",
    "check_loss_reduction",
    "check_parameters",
    "check_threshold",
    "check_valid",
    "clip_to",
    "clips_one_by_one",
    "create_norm_sample",
    "expect_loss",
    "held_by",
    "held_one_by_one",
    "is_small",
    "is_taken_unrounded",
    "left_in",
    "may_be_taken_in_turn",
    "not_noted",
    "note_zeros",
    "nothing_left",
    "plans",
    "rounding",
    "safe_factors",
    "shares_noise",
    "size_of",
    "takes_unrounded",
    "unrounded",
    "wait_for_noise",
    "waits_for_its_turn",
    "warn_of_16_bits",
    "way_unwritten",
]
