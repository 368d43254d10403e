"""Per-sample gradients for PyTorch, at the speed of the hardware."""

from dpfast import ops, rules
from dpfast.clipping import ConstantFlatClipper, NormClipper
from dpfast.errors import DpfastError
from dpfast.fast_gradient_clipping import GradSampleModuleFastGradientClipping, create_norm_sample
from dpfast.grad_sample_module import GradSampleModule
from dpfast.registry import register_grad_sampler, register_norm_sampler, register_rule

__all__ = [
    "ConstantFlatClipper",
    "DpfastError",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "NormClipper",
    "create_norm_sample",
    "ops",
    "register_grad_sampler",
    "register_norm_sampler",
    "register_rule",
    "rules",
]
