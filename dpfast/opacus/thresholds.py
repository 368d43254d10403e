"""The thresholds that are given to an engine or an optimizer, and whose each is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn, optim

from dpfast.errors import InputError
from dpfast.modes import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    GradSampleModuleFastGradientClipping,
    check_threshold,
)


def check_clipping(grad_sample_mode: str, clipping: str, max_grad_norm: Any) -> None:
    """Raises InputError where the mode does not clip so, or thresholds are not as ``clipping`` wants them."""
    allowed = {
        "dpfast": ("flat", "per_layer"),
        "dpfast_compiled": ("flat", "per_layer"),
        "dpfast_two_pass": ("flat",),
        "dpfast_materialize": ("flat", "per_layer", "adaptive"),
    }[grad_sample_mode]
    if clipping not in allowed:
        raise InputError(
            f"clipping={clipping!r} does not go with grad_sample_mode={grad_sample_mode!r}, which has "
            f"{', '.join(allowed)}; adaptive clipping needs 'dpfast_materialize'"
        )
    if isinstance(max_grad_norm, Sequence) != (clipping == "per_layer"):
        raise InputError(
            f"max_grad_norm={max_grad_norm} does not go with clipping={clipping!r}: a list of one threshold for each "
            "trainable parameter with 'per_layer', one number otherwise"
        )
    if clipping != "per_layer":
        check_threshold(max_grad_norm)


def _in_optimizer(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def check_number(optimizer: optim.Optimizer, thresholds: Sequence[float]) -> None:
    """Raises InputError where there is not one threshold for each trainable parameter."""
    number = len(_in_optimizer(optimizer))
    if number != len(thresholds):
        raise InputError(
            f"max_grad_norm has {len(thresholds)} thresholds for {number} trainable parameters of the optimizer; give "
            "one for each, in the optimizer's order"
        )
    for threshold in thresholds:
        check_threshold(threshold)


def per_layer_clipper(
    module: nn.Module, optimizer: optim.Optimizer, thresholds: Sequence[float]
) -> ConstantPerLayerClipper:
    """Thresholds from the order of the optimizer's parameters, Opacus's, to that of the module's."""
    by_parameter = dict(zip(_in_optimizer(optimizer), thresholds, strict=True))
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p not in by_parameter]
    if missing:
        raise InputError(
            f"per-layer clipping has no threshold for {', '.join(missing)}, trainable and not in the optimizer; freeze "
            "them or hand them to the optimizer"
        )
    return ConstantPerLayerClipper([by_parameter[p] for p in module.parameters() if p.requires_grad])


def set_sensitivity(module: GradSampleModuleFastGradientClipping, sensitivity: float) -> None:
    """Has the module clip to that sensitivity from the next backward pass on; per-layer thresholds keep their ratios.

    Raises:
        InputError: not a positive finite number, or the module has a clipper whose thresholds are its own business.
    """
    value, clipper = check_threshold(sensitivity), module.norm_clipper
    if clipper is None:
        module.max_grad_norm = value
    elif isinstance(clipper, ConstantPerLayerClipper):
        ratio = value / clipper.sensitivity
        clipper.flat_values = [threshold * ratio for threshold in clipper.flat_values]
    elif isinstance(clipper, ConstantFlatClipper):
        clipper.flat_value = value
    elif value != clipper.sensitivity:
        raise InputError(f"{type(clipper).__name__} clips to {clipper.sensitivity}, not to max_grad_norm={value}")
