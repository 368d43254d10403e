"""``torch.ops.dpfast.*``: the three verbs over both backends as torch custom ops, with fakes, so that they survive
``torch.compile`` and ``torch.export``. The dispatcher's time is spent only where a graph is being traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import kernel_norms, reference, reference_norms
from dpfast.arithmetic.backends import choose_backend
from dpfast.arithmetic.kernel_norms import import_kernels, unit_last_stride
from dpfast.arithmetic.precision import accumulating_dtype, exact_arithmetic, towards_zero
from dpfast.arithmetic.tracing import is_traced


def _grad_sample(
    activations: Tensor, backprops: Tensor, bias: bool, scale: float, out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    with exact_arithmetic():
        backend = choose_backend(backend, activations.device, activations.dtype, backprops.dtype)
        if backend == "triton":
            kernels, _ = import_kernels()
            result = kernels.outer_product(
                unit_last_stride(activations),
                unit_last_stride(backprops),
                bias=bias,
                scale=scale,
                out_dtype=out_dtype,
            )
            return result.grad_sample, result.bias_grad_sample if bias else activations.new_empty(0)
        weight = reference.grad_sample(activations, backprops, scale=scale).to(out_dtype)
        if not bias:
            return weight, activations.new_empty(0)
        return weight, reference.bias_grad_sample(backprops, scale=scale).to(out_dtype)


_grad_sample_op = torch.library.custom_op("dpfast::grad_sample", _grad_sample, mutates_args=())


@_grad_sample_op.register_fake
def _(
    activations: Tensor, backprops: Tensor, bias: bool, scale: float, out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    (n, _, d), p = activations.shape, backprops.shape[-1]
    bias_sample = backprops.new_empty((n, p), dtype=out_dtype) if bias else activations.new_empty(0)
    return activations.new_empty((n, p, d), dtype=out_dtype), bias_sample


def _sq_norm(activations: Tensor, backprops: Tensor, way: str, backend: str) -> tuple[Tensor, Tensor]:
    with exact_arithmetic():
        backend = choose_backend(backend, activations.device, activations.dtype, backprops.dtype)
        if backend == "triton":
            norm = kernel_norms.sq_norm(unit_last_stride(activations), unit_last_stride(backprops), way)
        else:
            norm = reference_norms.SQ_NORMS[way](activations, backprops)
        return norm.value, norm.upper


_sq_norm_op = torch.library.custom_op("dpfast::sq_norm", _sq_norm, mutates_args=())


@_sq_norm_op.register_fake
def _(activations: Tensor, backprops: Tensor, way: str, backend: str) -> tuple[Tensor, ...]:
    n = activations.shape[0]
    return tuple(activations.new_empty(n, dtype=torch.float64) for _ in range(2))


def _weighted_sum(
    activations: Tensor, backprops: Tensor, coefficients: Tensor, bias: bool, backend: str
) -> tuple[Tensor, Tensor]:
    with exact_arithmetic():
        backend = choose_backend(backend, activations.device, activations.dtype, backprops.dtype)
        if backend == "triton":
            kernels, _ = import_kernels()
            result = kernels.weighted_sum(
                unit_last_stride(activations),
                unit_last_stride(backprops),
                towards_zero(coefficients, torch.float32),
                bias=bias,
            )
            return result.weight, result.bias if bias else activations.new_empty(0)
        weight = reference.weighted_sum(activations, backprops, coefficients)
        return weight, reference.weighted_bias_sum(backprops, coefficients) if bias else activations.new_empty(0)


def rounded_sum(activations: Tensor, backprops: Tensor, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`weighted_sum` where kernels run and nothing is traced, rounded to nearest as it is written: fp32 sums of a
    large model's layers would be twice as much to write, and to read again."""
    kernels, _ = import_kernels()
    with exact_arithmetic():
        c = towards_zero(coefficients, torch.float32)
        a, b = unit_last_stride(activations), unit_last_stride(backprops)
        weight: Tensor = kernels.weighted_sum(a, b, c, out_dtype=dtype).weight
        return weight


_weighted_sum_op = torch.library.custom_op("dpfast::weighted_sum", _weighted_sum, mutates_args=())


@_weighted_sum_op.register_fake
def _(activations: Tensor, backprops: Tensor, coefficients: Tensor, bias: bool, backend: str) -> tuple[Tensor, Tensor]:
    dtype = accumulating_dtype(activations, backprops)
    p, d = backprops.shape[-1], activations.shape[-1]
    bias_sum = backprops.new_empty(p, dtype=dtype) if bias else activations.new_empty(0)
    return activations.new_empty((p, d), dtype=dtype), bias_sum


def _large_sum(activations: Tensor, backprops: Tensor, *_: object) -> bool:
    """Whether a sum's product is large enough for a call of its own, which sees values: it copies no samples that are
    dropped and finite, and takes the library that is faster."""
    (n, t, d), p = activations.shape, backprops.shape[-1]
    return activations.device.type == "cpu" and n * t * d * p >= 2**24


def _where_traced(
    op: Callable[..., Any], function: Callable[..., Any], is_large: Callable[..., bool] = lambda *_: False
) -> Callable[..., Any]:
    """The op where a graph is being traced, elsewhere its function; so, too, of what is captured and not for kernels,
    which a compiler makes loops of."""

    def call(*args: Any) -> Any:
        if not is_traced():
            return function(*args)
        kernels = choose_backend(args[-1], args[0].device, args[0].dtype, args[1].dtype) == "triton"
        whole = kernels or torch.compiler.is_compiling() or is_large(*args)
        return op(*args) if whole else function(*args)

    return call


grad_sample = _where_traced(_grad_sample_op, _grad_sample)
sq_norm = _where_traced(_sq_norm_op, _sq_norm)
weighted_sum = _where_traced(_weighted_sum_op, _weighted_sum, _large_sum)
