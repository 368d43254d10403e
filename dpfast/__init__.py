"""Per-sample gradients for PyTorch, at the speed of the hardware."""

from dpfast import autograd_grad_sample, ops, rules
from dpfast.clipping import AutomaticClipper, ConstantFlatClipper, ConstantPerLayerClipper, NormClipper
from dpfast.errors import DpfastError
from dpfast.explain import explain
from dpfast.fast_gradient_clipping import GradSampleModuleFastGradientClipping, create_norm_sample
from dpfast.grad_sample_module import GradSampleModule
from dpfast.info import info
from dpfast.per_sample_gradient_clipper import PerSampleGradientClipper
from dpfast.registry import register_grad_sampler, register_norm_sampler, register_rule
from dpfast.rules.linear import compute_linear_grad_sample, compute_linear_norm_sample

__all__ = [
    "AutomaticClipper",
    "ConstantFlatClipper",
    "ConstantPerLayerClipper",
    "DpfastError",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "NormClipper",
    "PerSampleGradientClipper",
    "autograd_grad_sample",
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
