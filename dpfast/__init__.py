"""Per-sample gradients for PyTorch, at the speed of the hardware."""

import importlib
from typing import Any

from dpfast import rules
from dpfast.arithmetic import ops
from dpfast.compiled import compile_step
from dpfast.distributed import UnitPoissonSampler
from dpfast.errors import DpfastError
from dpfast.former_names import keep_former_names
from dpfast.modes import (
    AutomaticClipper,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    NormClipper,
    PerSampleGradientClipper,
    autograd_grad_sample,
    create_norm_sample,
)
from dpfast.report import explain, info
from dpfast.rules import compute_linear_grad_sample, compute_linear_norm_sample
from dpfast.taps import register_grad_sampler, register_norm_sampler, register_rule

__version__ = "0.1.0"

__all__ = [
    "AutomaticClipper",
    "ConstantFlatClipper",
    "ConstantPerLayerClipper",
    "DpfastError",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "NormClipper",
    "PerSampleGradientClipper",
    "UnitPoissonSampler",
    "autograd_grad_sample",
    "compile_step",
    "compute_linear_grad_sample",
    "compute_linear_norm_sample",
    "create_norm_sample",
    "explain",
    "info",
    "ops",
    "register_grad_sampler",
    "register_norm_sampler",
    "register_rule",
    "rules",
]

keep_former_names()


def __getattr__(name: str) -> Any:
    """What not everybody needs, and Opacus with it, is imported when it is asked for."""
    if name in ("opacus", "testing"):
        return importlib.import_module(f"dpfast.{name}")
    raise AttributeError(f"module 'dpfast' has no attribute {name!r}")
