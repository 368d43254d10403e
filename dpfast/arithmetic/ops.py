"""The verbs on ``G_n = Σ_t b_nt a_ntᵀ``: ``grad_sample``, ``sq_norm`` (``norm_sample``) and ``weighted_sum``, over both
backends. The backend is chosen by what can run where the tensors are (``backends.py``), the way by their shapes
(``cost.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dpfast.arithmetic import cost, custom_ops, kernel_norms, reference, reference_norms, sums
from dpfast.arithmetic.backends import Backend, choose_backend
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.kernel_norms import Direct, unit_last_stride
from dpfast.arithmetic.precision import accumulating_dtype, exact_arithmetic, reduced_products, towards_zero
from dpfast.arithmetic.row_norms import taken_once, ways_here
from dpfast.arithmetic.stacked_grams import UnfinishedGram
from dpfast.arithmetic.stacked_kernel_norms import KernelDirect, KernelGram, KernelRankOne
from dpfast.arithmetic.stacked_norms import SumError, Unfinished
from dpfast.arithmetic.tracing import is_traced
from dpfast.errors import InputError

_WORTH_A_KERNEL = 2**14
"""Entries of a sample from which row norms that nothing else is taken with have a launch of the kernel; it reads 16-bit
rows once, where torch writes them in fp32 first."""

_dtype: Any = Tensor.dtype.__get__  # type: ignore[attr-defined]  # of a tensor, without a line of Python

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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


@overload
def grad_sample(
    activations: Tensor,
    backprops: Tensor,
    *,
    bias: Literal[False] = ...,
    scale: float = ...,
    out_dtype: torch.dtype | None = ...,
    backend: Backend = ...,
) -> Tensor: ...


@overload
def grad_sample(
    activations: Tensor,
    backprops: Tensor,
    *,
    bias: Literal[True],
    scale: float = ...,
    out_dtype: torch.dtype | None = ...,
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...


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
    out_dtype = out_dtype or accumulating_dtype(activations, backprops)
    weight, bias_sample = custom_ops.grad_sample(activations, backprops, bias, scale, out_dtype, backend)
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
    t = activations.shape[1]
    if way == "auto":
        way = norm_way(activations, backprops)
    if way not in reference_norms.SQ_NORMS or (way == "rank_one" and t > 1):
        raise InputError(
            f"way={way!r} does not exist for T = {t}; use 'auto', 'gram', 'direct', or 'rank_one' for T = 1"
        )
    return SquaredNorm(*custom_ops.sq_norm(activations, backprops, way, backend))


def norm_way(activations: Tensor, backprops: Tensor) -> cost.Way:
    """The way that "auto" takes for (N, T, ·) inputs: by ``cost.py``, and the direct one where a gradient is small."""
    return norm_ways(activations, backprops, activations.shape[1:2])[0]


def norm_ways(activations: Tensor, backprops: Tensor, lengths: Sequence[int]) -> list[cost.Way]:
    """:func:`norm_way` of inputs that have these in the place of T."""
    d, p = activations.shape[-1], backprops.shape[-1]
    if runs_kernels(activations, backprops):
        return [cost.norm_way(t, d, p) for t in lengths]
    small = d * p * accumulating_dtype(activations, backprops).itemsize <= cost.SMALL_GRADIENT
    return ["direct" if small and t > 1 else cost.norm_way(t, d, p, activations.device) for t in lengths]


def unfinished_norm(
    activations: Tensor, backprops: Tensor
) -> Unfinished | UnfinishedGram | KernelDirect | KernelGram | KernelRankOne | None:
    """What the norm of (N, T, ·) inputs follows from; None where it is traced, or taken in :func:`grouped_direct`."""
    if is_traced():
        return None
    way = norm_way(activations, backprops)
    with exact_arithmetic():
        if runs_kernels(activations, backprops):
            if way == "direct" and groups(activations, backprops):
                return None
            return kernel_norms.unfinished(unit_last_stride(activations), unit_last_stride(backprops), way)
        if way == "gram":
            return reference_norms.unfinished_gram(activations, backprops)
        if way == "rank_one":
            return reference_norms.unfinished_rank_one(activations, backprops)
        return reference_norms.unfinished_direct(activations, backprops)


def direct_norm(activations: Tensor, backprops: Tensor, error: SumError) -> Unfinished:
    """:func:`unfinished_norm` of inputs that are known to go that way, with an error that is known."""
    return reference_norms.unfinished_direct(activations, backprops, error)


def certified_grad_sample(
    activations: Tensor, backprops: Tensor
) -> tuple[Tensor, Tensor | SumError | Callable[[], Tensor], SquaredNorm | KernelDirect | None]:
    """G (N, P, D) of (N, T, ·) inputs, how far it may be off in L2 norm, (N,) fp64, or what gives that, and its norm
    where it is known, or what it follows from."""
    dtype = accumulating_dtype(activations, backprops)
    if runs_kernels(activations, backprops):
        a, b = unit_last_stride(activations), unit_last_stride(backprops)
        with exact_arithmetic():
            if not is_traced() and not groups(a, b):
                norm, grad_sample = kernel_norms.kept(a, b)
                return grad_sample, norm.error, norm
            direct = kernel_norms.direct(a, b, keep=True)
        return direct.grad_sample, direct.error, direct.norm  # type: ignore[return-value]  # it is kept
    activations, backprops = activations.to(dtype), backprops.to(dtype)  # once for both
    with exact_arithmetic():
        return reference.grad_sample(activations, backprops), SumError.of_products(activations, backprops), None


def certified_blocks(activations: Tensor, backprops: Tensor) -> tuple[Iterator[Tensor], SumError] | None:
    """As :func:`certified_grad_sample`, G in blocks of samples as they come; None where it is made in one go."""
    (n, _, d), p, dtype = activations.shape, backprops.shape[2], accumulating_dtype(activations, backprops)
    small = n * d * p * dtype.itemsize <= reference.KEPT_BLOCK
    if small or is_traced() or activations.device.type != "cpu" or runs_kernels(activations, backprops):
        return None
    activations, backprops = activations.to(dtype), backprops.to(dtype)
    return reference.grad_sample_blocks(activations, backprops), SumError.of_products(activations, backprops)


def row_norm(x: Tensor) -> Tensor:
    """Upper bounds, but for their own rounding, of the L2 norms of the rows of what a layer saw, (N, T) in fp64; each
    taken once a step, see ``row_norms``. For error terms only."""
    if is_traced():
        return sums.row_norm(x)
    if takes_row_norms(x):
        return kernel_norms.row_norm(unit_last_stride(x)).double()
    return sums.row_norm(x, once=True)


def raw_row_norm(x: Tensor) -> tuple[Tensor, float]:
    """:func:`row_norm` in some dtype, and what each norm may lack for underflow."""
    if is_traced():
        return sums.raw_row_norm(x), sums.lost_to_underflow(x)
    if takes_row_norms(x):
        return kernel_norms.row_norm(unit_last_stride(x)), 0.0
    return taken_once(sums.raw_row_norm, x), sums.lost_to_underflow(x)


def takes_row_norms(x: Tensor) -> bool:
    """Whether a kernel takes the row norms of such (N, T, D)."""
    return x.shape[1] * x.shape[2] >= _WORTH_A_KERNEL and runs_kernels(x)


def circumstances() -> tuple[object, ...]:
    """What the way of a norm depends on beside shapes, dtypes and devices."""
    return os.environ.get("DPFAST_BACKEND"), reduced_products()


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether "auto" takes the kernels for inputs such as these."""
    kind, known = (tensors[0].device, *map(_dtype, tensors)), ways_here()
    found = None if known is None else known.get(kind)
    if found is None:
        found = choose_backend("auto", *kind) == "triton"
        if known is not None:
            known[kind] = found
    return found


_SPLIT = {torch.bfloat16: 2.0**-17, torch.float16: 3.0 * 2.0**-17}
"""See ``kernels/weighted_sum.py``."""


def sum_excess(activations: Tensor, backprops: Tensor) -> float:
    """By how much, relatively, the products of a weighted sum may come out too large: kernels take a factor's product
    with 16-bit rows in two pieces of bf16, and of fp16 rows without that of the low pieces; fp32 products may run in
    less where a global switch says so."""
    if runs_kernels(activations, backprops):
        return max(_SPLIT.get(activations.dtype, 0.0), _SPLIT.get(backprops.dtype, 0.0))
    return reference_excess(activations, backprops)


def reference_excess(activations: Tensor, backprops: Tensor) -> float:
    """:func:`sum_excess` where the reference sums."""
    return 0.0 if accumulating_dtype(activations, backprops) is torch.float64 else reduced_products()


def weighted_values(values: Tensor, coefficients: Tensor) -> Tensor:
    """``Σ_n c_n v_n`` of gradients that are kept, of several layers: (L, N, K) to (L, K). A sample with c_n = 0 adds
    exactly nothing, whatever it holds."""
    if values.dtype is torch.float32 and values.is_contiguous() and runs_kernels(values):
        return kernel_norms.weighted_rows(values, towards_zero(coefficients, torch.float32))
    if values.shape[0] == 1:
        return reference.weighted_rows([values.squeeze(0)], coefficients).unsqueeze(0)
    return reference.weighted_values(values, coefficients).squeeze(1)


normalized_sum = kernel_norms.normalized_sum
"""Where :func:`runs_kernels` says so."""


def groups(activations: Tensor, backprops: Tensor) -> bool:
    """Whether such pairs (N, T, ·) are for :func:`grouped_direct`: thin ones, where kernels run."""
    _, t, d = activations.shape
    return runs_kernels(activations, backprops) and kernel_norms.groups(t, d, backprops.shape[2])


def grouped_direct(pairs: Sequence[tuple[Tensor, Tensor]], *, keep: bool = False) -> list[Direct]:
    """Norms, and with ``keep`` the gradients, of many pairs that :func:`groups` says yes to.

    Pairs of one shape and layout share their launches. Each has the bits it has alone: those of
    :func:`certified_sq_norm` with ``way="direct"``.
    """
    with exact_arithmetic():
        return kernel_norms.grouped([(unit_last_stride(a), unit_last_stride(b)) for a, b in pairs], keep=keep)


def sq_norm(activations: Tensor, backprops: Tensor, *, way: str = "auto", backend: Backend = "auto") -> Tensor:
    """‖Σ_t b_nt a_ntᵀ‖² (N,), in fp32 (fp64 where an input is fp64). G is never written whole.

    Args, Raises: as :func:`certified_sq_norm`, which also gives the proven upper bound.

    Cost:
        the least of ``cost.norm_flops``; at most ``reference.WORKSPACE_BYTES`` of workspace.

    >>> sq_norm(torch.ones(2, 3, 4), torch.ones(2, 3, 5)).tolist()
    [180.0, 180.0]
    """
    value = certified_sq_norm(activations, backprops, way=way, backend=backend).value
    return value.to(accumulating_dtype(activations, backprops))


def norm_sample(activations: Tensor, backprops: Tensor, *, way: str = "auto", backend: Backend = "auto") -> Tensor:
    """‖Σ_t b_nt a_ntᵀ‖ (N,): the square root of :func:`sq_norm`, taken before it is rounded."""
    value = certified_sq_norm(activations, backprops, way=way, backend=backend).value
    return value.sqrt().to(accumulating_dtype(activations, backprops))


@overload
def weighted_sum(
    activations: Tensor,
    backprops: Tensor,
    coefficients: Tensor,
    *,
    bias: Literal[False] = ...,
    backend: Backend = ...,
    dtype: torch.dtype | None = ...,
) -> Tensor: ...


@overload
def weighted_sum(
    activations: Tensor,
    backprops: Tensor,
    coefficients: Tensor,
    *,
    bias: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...


def weighted_sum(
    activations: Tensor,
    backprops: Tensor,
    coefficients: Tensor,
    *,
    bias: bool = False,
    backend: Backend = "auto",
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The clipped sum.

    Maths:
        ``W = Σ_n c_n Σ_t b_nt a_ntᵀ`` and, for the bias, ``w = Σ_n c_n Σ_t b_nt``.

    Args:
        activations, backprops: as in :func:`grad_sample`.
        coefficients: c (N,), e.g. clip factors; rounded towards zero to the dtype that accumulates. A sample with
            c_n = 0 adds exactly nothing, even where it holds inf or NaN.
        bias: also return w.
        dtype: of W, rounded to it once, to nearest; without ``bias``.

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
    if dtype is not None and backend == "auto" and not is_traced() and runs_kernels(activations, backprops):
        return custom_ops.rounded_sum(activations, backprops, coefficients, dtype)
    weight, bias_sum = custom_ops.weighted_sum(activations, backprops, coefficients, bias, backend)
    return (weight, bias_sum) if bias else weight.to(dtype or weight.dtype)
