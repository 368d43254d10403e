"""The three verbs over both backends, as torch custom ops: the one place that chooses.

``grad_sample``, ``sq_norm`` (``norm_sample``) and ``weighted_sum`` of ``G_n = Σ_t b_nt a_ntᵀ`` are registered as
``torch.ops.dpfast.*`` with fake implementations, so they survive ``torch.compile`` and ``torch.export``.
The backend is chosen by what can run where the tensors are; the way by their shapes (``cost.py``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from dpfast import cost, kernel_norms, reference
from dpfast.bounds import SquaredNorm
from dpfast.errors import BackendError, DpfastWarning, InputError
from dpfast.kernel_norms import Direct, import_kernels
from dpfast.reference import ProductError, exact_arithmetic

Backend = Literal["auto", "triton", "reference"]
_BACKENDS = ("auto", "triton", "reference")
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_OLDEST_GPU = (8, 0)


def kernels_interpreted() -> bool:
    """Whether Triton's interpreter, which runs kernels on the CPU, is switched on."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=64)
def _why_not_on(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device``; None where they can."""
    kernels, problem = import_kernels()
    if kernels is None:
        return f"Triton is not usable ({problem})"
    if device.type == "cpu":
        return None if kernels_interpreted() else "Triton has no CPU backend (TRITON_INTERPRET=1 runs its interpreter)"
    if device.type != "cuda":
        return f"the kernels have no support for {device.type} devices"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_GPU:
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm_{capability[0]}{capability[1]}) is older than sm_{_OLDEST_GPU[0]}{_OLDEST_GPU[1]}"
    return None


@lru_cache(maxsize=64)
def _auto_backend(device: torch.device) -> str:
    if device.type == "cpu":  # the interpreter is for tests, which ask for it
        return "reference"
    why_not = _why_not_on(device)
    if why_not is None:
        return "triton"
    warnings.warn(f"dpfast takes the reference backend on {device}: {why_not}", DpfastWarning, stacklevel=4)
    return "reference"


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """ "triton" or "reference" for a request, a device and the accumulating dtype.

    ``DPFAST_BACKEND`` overrides "auto". fp64 goes to the reference, whose cuBLAS keeps fp64.

    Raises:
        BackendError: an unknown name, or a backend that cannot run on this device or dtype.
    """
    source = "backend"
    if backend == "auto" and (wanted := os.environ.get("DPFAST_BACKEND")):
        backend, source = wanted, "DPFAST_BACKEND"
    if backend not in _BACKENDS:
        raise BackendError(f"{source}={backend!r} is not one of {', '.join(map(repr, _BACKENDS))}")
    if backend == "auto":
        return "reference" if dtype == torch.float64 else _auto_backend(device)
    if backend == "triton":
        why_not = "the kernels have no fp64" if dtype == torch.float64 else _why_not_on(device)
        if why_not is not None:
            raise BackendError(f"{source}='triton' on {device}: {why_not}. Use backend='auto' or 'reference'.")
    return backend


def backend_report(device: torch.device) -> tuple[str, str]:
    """(the backend that "auto" takes on ``device``, why)."""
    chosen = choose_backend("auto", device)
    if os.environ.get("DPFAST_BACKEND") not in (None, "", "auto"):
        return chosen, "DPFAST_BACKEND says so"
    return chosen, _why_not_on(device) or (
        "the einsum path is faster than an interpreter" if device.type == "cpu" else "Triton runs here"
    )


# --- the ops ------------------------------------------------------------------------------------------------------


def _grad_sample(
    activations: Tensor, backprops: Tensor, bias: bool, scale: float, out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    with exact_arithmetic():
        backend = choose_backend(backend, activations.device, reference.compute_dtype(activations, backprops))
        if backend == "triton":
            kernels, _ = import_kernels()
            result = kernels.outer_product(
                _unit_last_stride(activations),
                _unit_last_stride(backprops),
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
def _(activations, backprops, bias, scale, out_dtype, backend):
    (n, _, d), p = activations.shape, backprops.shape[-1]
    bias_sample = backprops.new_empty((n, p), dtype=out_dtype) if bias else activations.new_empty(0)
    return activations.new_empty((n, p, d), dtype=out_dtype), bias_sample


def _sq_norm(activations: Tensor, backprops: Tensor, way: str, backend: str) -> tuple[Tensor, Tensor]:
    with exact_arithmetic():
        backend = choose_backend(backend, activations.device, reference.compute_dtype(activations, backprops))
        if backend == "triton":
            norm = kernel_norms.sq_norm(_unit_last_stride(activations), _unit_last_stride(backprops), way)
        else:
            norm = _REFERENCE_NORMS[way](activations, backprops)
        return norm.value, norm.upper


_REFERENCE_NORMS = {
    "rank_one": reference.rank_one_sq_norm,
    "gram": reference.gram_sq_norm,
    "direct": reference.direct_sq_norm,
}


_sq_norm_op = torch.library.custom_op("dpfast::sq_norm", _sq_norm, mutates_args=())


@_sq_norm_op.register_fake
def _(activations, backprops, way, backend):
    n = activations.shape[0]
    return tuple(activations.new_empty(n, dtype=torch.float64) for _ in range(2))


def _weighted_sum(
    activations: Tensor, backprops: Tensor, coefficients: Tensor, bias: bool, backend: str
) -> tuple[Tensor, Tensor]:
    with exact_arithmetic():
        backend = choose_backend(backend, activations.device, reference.compute_dtype(activations, backprops))
        if backend == "triton":
            kernels, _ = import_kernels()
            result = kernels.weighted_sum(
                _unit_last_stride(activations), _unit_last_stride(backprops), coefficients.float(), bias=bias
            )
            return result.weight, result.bias if bias else activations.new_empty(0)
        weight = reference.weighted_sum(activations, backprops, coefficients)
        return weight, reference.weighted_bias_sum(backprops, coefficients) if bias else activations.new_empty(0)


_weighted_sum_op = torch.library.custom_op("dpfast::weighted_sum", _weighted_sum, mutates_args=())


@_weighted_sum_op.register_fake
def _(activations, backprops, coefficients, bias, backend):
    dtype = reference.compute_dtype(activations, backprops)
    p, d = backprops.shape[-1], activations.shape[-1]
    bias_sum = backprops.new_empty(p, dtype=dtype) if bias else activations.new_empty(0)
    return activations.new_empty((p, d), dtype=dtype), bias_sum


def _unit_last_stride(x: Tensor) -> Tensor:
    """The tensor itself where its last dimension has stride 1, as the kernels need it; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


# --- the public verbs ---------------------------------------------------------------------------------------------


def _call(op: Callable, function: Callable, *args: Any) -> Any:
    """The op where a graph is being traced; elsewhere its function, which saves the dispatcher's time."""
    return op(*args) if torch.compiler.is_compiling() else function(*args)


def as_rows(activations: Tensor, backprops: Tensor, where: object = "ops") -> tuple[Tensor, Tensor]:
    """Both tensors as (N, T, ·): 2-D inputs get T = 1, the middle dimensions of n-D inputs are flattened.

    Raises:
        InputError: fewer than two dimensions, leading dimensions or devices that differ, a dtype that is not
            floating point; the message names ``where``, both shapes and the remedy.
    """
    if activations.dim() < 2 or activations.shape[:-1] != backprops.shape[:-1]:
        raise InputError(
            f"{where}: {_shapes(activations, backprops)} do not fit; they must be (N, ..., in_features) and "
            "(N, ..., out_features) with the same N and the same dimensions in between"
        )
    if activations.device != backprops.device:
        raise InputError(
            f"{where}: {_shapes(activations, backprops)} are on {activations.device} and {backprops.device}; move "
            "them to one device"
        )
    for name, x in (("activations", activations), ("backprops", backprops)):
        if x.dtype not in _FLOATING:
            raise InputError(
                f"{where}: {name} {tuple(x.shape)} has dtype {x.dtype}; use bfloat16, float16, "
                f"float32 or float64 ({_shapes(activations, backprops)})"
            )
    if activations.dim() == 2:
        return activations.unsqueeze(1), backprops.unsqueeze(1)
    if activations.dim() > 3:
        return activations.flatten(1, -2), backprops.flatten(1, -2)
    return activations, backprops


def _shapes(activations: Tensor, backprops: Tensor) -> str:
    return f"activations {tuple(activations.shape)} and backprops {tuple(backprops.shape)}"


def accumulating_dtype(activations: Tensor, backprops: Tensor) -> torch.dtype:
    """fp64 where an input is fp64, else fp32: what sums are taken in and, unless asked otherwise, returned in."""
    return reference.compute_dtype(activations, backprops)


def grad_sample(
    activations: Tensor,
    backprops: Tensor,
    *,
    bias: bool = False,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Per-sample gradients of a linear map.

    Maths:
        ``G_n = scale · Σ_t b_nt a_ntᵀ`` and, for the bias, ``g_n = scale · Σ_t b_nt``.

    Args:
        activations: (N, ..., D), bf16, fp16, fp32 or fp64; any strides. Read only.
        backprops: (N, ..., P), dtypes may differ. Read only.
        bias: also return g_n, summed in the same pass.
        scale: N where the loss was a mean over samples.
        out_dtype: fp32 unless given (fp64 where an input is fp64); rounded once.
        backend: "auto", "triton" or "reference".

    Returns:
        G (N, P, D); with ``bias``, (G, g) with g (N, P). Fresh tensors.

    Raises:
        InputError: shapes, devices or dtypes do not fit. BackendError: the backend cannot run here.

    Numerics:
        Accumulated in fp32 (fp64), IEEE also for fp32 inputs.

    Cost:
        2·N·T·D·P FLOPs; writes N·P·D.

    >>> a, b = torch.ones(2, 3, 4), torch.ones(2, 3, 5)
    >>> grad_sample(a, b).shape, grad_sample(a, b)[0, 0, 0].item()
    (torch.Size([2, 5, 4]), 3.0)
    """
    activations, backprops = as_rows(activations, backprops)
    out_dtype = out_dtype or reference.compute_dtype(activations, backprops)
    weight, bias_sample = _call(_grad_sample_op, _grad_sample, activations, backprops, bias, scale, out_dtype, backend)
    return (weight, bias_sample) if bias else weight


def certified_sq_norm(
    activations: Tensor, backprops: Tensor, *, way: str = "auto", backend: Backend = "auto"
) -> SquaredNorm:
    """‖Σ_t b_nt a_ntᵀ‖² with an upper bound of the exact value, each (N,) in fp64.

    Args:
        activations, backprops: as in :func:`grad_sample`.
        way: "rank_one" (T = 1), "gram", "direct", or "auto": the cheapest by ``cost.py``.

    Raises:
        InputError: as :func:`grad_sample`, or a way that does not exist or does not fit T.
    """
    activations, backprops = as_rows(activations, backprops)
    t, d, p = activations.shape[1], activations.shape[2], backprops.shape[2]
    if way == "auto":
        way = cost.norm_way(t, d, p)
    if way not in _REFERENCE_NORMS or (way == "rank_one" and t > 1):
        raise InputError(
            f"way={way!r} does not exist for T = {t}; use 'auto', 'gram', 'direct', or 'rank_one' for T = 1"
        )
    return SquaredNorm(*_call(_sq_norm_op, _sq_norm, activations, backprops, way, backend))


def certified_grad_sample(
    activations: Tensor, backprops: Tensor
) -> tuple[Tensor, Tensor | ProductError, SquaredNorm | None]:
    """G (N, P, D) of (N, T, ·) inputs, how far it may be off in L2 norm, (N,) fp64, and its norm where it is known."""
    dtype = reference.compute_dtype(activations, backprops)
    if choose_backend("auto", activations.device, dtype) == "triton":
        if kernel_norms.groups(*activations.shape[1:], backprops.shape[2]):
            (direct,) = grouped_direct([(activations, backprops)], keep=True)
            return direct.grad_sample, direct.error, direct.norm
        error = ProductError.of(activations, backprops, import_kernels()[0].CHAIN)
        return grad_sample(activations, backprops), error, None
    activations, backprops = activations.to(dtype), backprops.to(dtype)  # once for both
    with exact_arithmetic():
        return reference.grad_sample(activations, backprops), ProductError.of(activations, backprops), None


def certified_blocks(activations: Tensor, backprops: Tensor) -> tuple[Iterator[Tensor], Tensor] | None:
    """As :func:`certified_grad_sample`, G in blocks of samples as they come; None where it is made in one go."""
    (n, _, d), p, dtype = activations.shape, backprops.shape[2], reference.compute_dtype(activations, backprops)
    small = n * d * p * dtype.itemsize <= reference.KEPT_BLOCK
    if small or activations.device.type != "cpu" or choose_backend("auto", activations.device, dtype) == "triton":
        return None
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    return reference.grad_sample_blocks(activations, backprops), ProductError.of(activations, backprops).bound()


def groups(activations: Tensor, backprops: Tensor) -> bool:
    """Whether such pairs (N, T, ·) are for :func:`grouped_direct`: thin ones, where kernels run."""
    backend = choose_backend("auto", activations.device, reference.compute_dtype(activations, backprops))
    return backend == "triton" and kernel_norms.groups(*activations.shape[1:], backprops.shape[2])


def grouped_direct(pairs: Sequence[tuple[Tensor, Tensor]], *, keep: bool = False) -> list[Direct]:
    """Norms, and with ``keep`` the gradients, of many pairs that :func:`groups` says yes to.

    Pairs of one shape and layout share their launches. Each has the bits it has alone: those of
    :func:`certified_sq_norm` with ``way="direct"``.
    """
    with exact_arithmetic():
        return kernel_norms.grouped([(_unit_last_stride(a), _unit_last_stride(b)) for a, b in pairs], keep=keep)


def sq_norm(activations: Tensor, backprops: Tensor, *, way: str = "auto", backend: Backend = "auto") -> Tensor:
    """‖Σ_t b_nt a_ntᵀ‖² (N,), in fp32 (fp64 where an input is fp64). G is never written whole.

    Args, Raises: as :func:`certified_sq_norm`, which also gives the proven upper bound.

    Cost:
        the least of ``cost.norm_flops``; at most ``reference.WORKSPACE_BYTES`` of workspace.

    >>> sq_norm(torch.ones(2, 3, 4), torch.ones(2, 3, 5)).tolist()
    [180.0, 180.0]
    """
    value = certified_sq_norm(activations, backprops, way=way, backend=backend).value
    return value.to(reference.compute_dtype(activations, backprops))


def norm_sample(activations: Tensor, backprops: Tensor, *, way: str = "auto", backend: Backend = "auto") -> Tensor:
    """‖Σ_t b_nt a_ntᵀ‖ (N,): the square root of :func:`sq_norm`, taken before it is rounded."""
    value = certified_sq_norm(activations, backprops, way=way, backend=backend).value
    return value.sqrt().to(reference.compute_dtype(activations, backprops))


def weighted_sum(
    activations: Tensor,
    backprops: Tensor,
    coefficients: Tensor,
    *,
    bias: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The clipped sum.

    Maths:
        ``W = Σ_n c_n Σ_t b_nt a_ntᵀ`` and, for the bias, ``w = Σ_n c_n Σ_t b_nt``.

    Args:
        activations, backprops: as in :func:`grad_sample`.
        coefficients: c (N,), e.g. clip factors. A sample with c_n = 0 adds exactly nothing, even where it holds
            inf or NaN.
        bias: also return w.

    Returns:
        W (P, D) in fp32 (fp64 where an input is fp64); with ``bias``, (W, w). Fresh tensors.

    Raises:
        InputError: as :func:`grad_sample`, or coefficients that are not (N,) floats.

    Cost:
        2·N·T·D·P FLOPs, one GEMM.
    """
    activations, backprops = as_rows(activations, backprops)
    if coefficients.shape != activations.shape[:1] or coefficients.dtype not in _FLOATING:
        raise InputError(
            f"coefficients {tuple(coefficients.shape)} ({coefficients.dtype}) must be floats of shape "
            f"({activations.shape[0]},) for activations {tuple(activations.shape)}"
        )
    weight, bias_sum = _call(_weighted_sum_op, _weighted_sum, activations, backprops, coefficients, bias, backend)
    return (weight, bias_sum) if bias else weight
