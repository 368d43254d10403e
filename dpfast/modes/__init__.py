"""What a model is wrapped in: which verb of a factor is called, and when.

``grad_sample_module`` materializes at once; ``fast_gradient_clipping`` takes norms and then clipped sums, in one pass
or two; ``per_sample_gradient_clipper`` and ``autograd_grad_sample`` have older interfaces. ``tapped_model``, ``steps``
and ``escaped_gradients`` are what they share; ``clippers`` says what is released. Imports ``rules`` and below.
"""

from dpfast.modes import autograd_grad_sample
from dpfast.modes.accumulation import Left, held_by, shares_noise
from dpfast.modes.clippers import (
    AutomaticClipper,
    ClipFactors,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    check_threshold,
    safe_factors,
)
from dpfast.modes.fast_gradient_clipping import GradSampleModuleFastGradientClipping, create_norm_sample
from dpfast.modes.grad_sample_module import GradSampleModule
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.modes.per_sample_gradient_clipper import PerSampleGradientClipper
from dpfast.modes.steps import Step
from dpfast.modes.tapped_model import TappedModel

__all__ = [
    "AutomaticClipper",
    "ClipFactors",
    "ConstantFlatClipper",
    "ConstantPerLayerClipper",
    "DroppedSamples",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "Left",
    "NormClipper",
    "PerSampleGradientClipper",
    "Step",
    "TappedModel",
    "autograd_grad_sample",
    "check_threshold",
    "create_norm_sample",
    "held_by",
    "safe_factors",
    "shares_noise",
]
