"""Normalisation within a sample: ``y = w ∘ x̂ + b``, so ``G_n = Σ_t b_nt ∘ x̂_nt`` and ``g_n = Σ_t b_nt``.

x̂ is computed again, in fp32 or fp64, from the layer's input; its own rounding counts in the gradients' error bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import (
    SumError,
    accumulating_dtype,
    bounds,
    calls_like,
    is_traced,
    ops,
    smallest_normal,
    sums,
    taken_once,
)
from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Again, Dense, Factor, channel_sum, row_sum
from dpfast.taps import Activations, register_node, register_rule

_SMALL_EPS = 1e-6
"""Below it a constant row, whose x̂ is 0, would get a large error: 1/√eps of what rounds its mean."""


def _where_known(error: Tensor, rstd: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The errors of statistics, infinite where squares have overflowed, or so many underflowed that their sum has lost
    digits: there x̂ says nothing, and the sample is dropped."""
    known = rstd > 0.0
    if eps < _least_eps(dtype):  # else no rstd is larger
        known &= rstd <= _least_eps(dtype) ** -0.5
    return torch.where(known, error, math.inf)


def _least_eps(dtype: torch.dtype) -> float:
    """From here on what underflows is no part of the statistics that counts."""
    return smallest_normal(dtype) / bounds.gamma(1, dtype)


def _bits(rows: Tensor) -> Tensor:
    """Of the numbers, -0 as 0. Bits can tell them apart where a processor takes subnormal ones for zero."""
    bits = rows.contiguous().view(torch.int64 if rows.dtype is torch.float64 else torch.int32)
    return bits.masked_fill(bits == torch.iinfo(bits.dtype).min, 0)


def _is_constant(rows: Tensor) -> Tensor | None:
    """Whether all entries of each row (..., D), D > 0, are the same finite number, (..., 1); None where no row's are,
    which on a CPU the first and the last entries mostly tell."""
    if rows.is_cpu and not is_traced() and not bool((rows[..., 0] == rows[..., -1]).any()):
        return None
    low, high = _bits(rows).aminmax(dim=-1, keepdim=True)
    return (low == high) & torch.isfinite(rows[..., :1])


def _summed(values: Tensor, norms: Tensor, error_of_rows: Tensor) -> Dense:
    """(N, T, D) -> their sums over T.

    Args:
        norms: of the rows, (N, T) fp64. error_of_rows: how far each may be from the exact one; overwritten.
    """
    if values.shape[1] == 1:
        return Dense(values.squeeze(1), error=error_of_rows.sum(1))
    relative, least = bounds.chain_terms(terms=values.shape[1], numel=values.shape[2], dtype=values.dtype)
    return Dense(values.sum(1), error=error_of_rows.add_(norms, alpha=relative).sum(-1).add_(least))


def _factors(layer: Any, of_weight: Callable[[], Dense], backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """Of its weight, where that is trained, and its bias; backprops (N, T, D)."""
    factors: dict[nn.Parameter, Factor] = {}
    of_bias = partial(row_sum, backprops)
    for parameter, make in ((layer.weight, of_weight), (getattr(layer, "bias", None), of_bias)):
        if parameter is None or not parameter.requires_grad:
            continue
        summed = factors[parameter] = make()
        if parameter.dim() > 1:
            factors[parameter] = Dense(summed.values.view(-1, *parameter.shape), error=summed.settled())
    return factors


def _weighted(normalized: Tensor, backprops: Tensor, relative_error: Tensor) -> Dense:
    """normalized, backprops (N, T, D); each row of ``normalized`` is exact to ``relative_error`` (N, T) times
    (1 + its entries)."""
    values = normalized * backprops
    norms = sums.row_norm(values)
    return _summed(values, norms, (sums.row_norm(backprops, once=True) + norms).mul_(relative_error))


def _as_rows(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(N, ..., *shape) -> (N, T, D) in ``dtype``."""
    n = x.shape[0]
    return x.to(dtype).reshape(n, x.shape[1:].numel() // width, width)


def _factors_by_kernel(
    layer: Any, inputs: Tensor, backprops: Tensor, width: int, eps: float, *, mean: bool
) -> dict[nn.Parameter, Factor] | None:
    """By a kernel that reads both inputs once, the same numbers but for their rounding; None where it is not for them.

    Numerics:
        As the rule's: the kernel takes the mean, then the mean square of what is left of it, and divides by a root.
    """
    if is_traced() or accumulating_dtype(inputs, backprops) is not torch.float32:
        return None
    if not ops.runs_kernels(inputs, backprops):
        return None
    weight, of_bias = layer.weight, getattr(layer, "bias", None)
    trained = [p for p in (weight, of_bias) if p is not None and p.requires_grad]
    least = _least_eps(torch.float32)
    positions = inputs.shape[1:].numel() // width
    relative, lost = bounds.chain_terms(terms=positions, numel=width, dtype=torch.float32)
    of_norm: dict[str, Any] = {
        "eps": eps,
        "mean": mean,
        "bias": of_bias is not None and of_bias.requires_grad,
        "largest": least**-0.5 if eps < least else math.inf,
        "constant": eps < _SMALL_EPS,
        "relative": (2.0 if mean else 1.0) * bounds.gamma(width + 8, torch.float32),
        "added": relative,
    }
    with_weight = weight is not None and weight.requires_grad
    shapes = [p.shape for p in trained]
    made = partial(_sums_by_kernel, width, shapes, with_weight, lost, of_norm)
    found = made(partial(ops.normalized_sum, **of_norm), inputs, backprops)
    if found is None:
        return None
    whole = partial(made, calls_like("normalized_sum", **of_norm))
    for place, factor in enumerate(found):
        factor.whole = whole, place
    return dict(zip(trained, found, strict=True))


def _sums_by_kernel(
    width: int,
    shapes: Sequence[torch.Size],
    with_weight: bool,
    lost: float,
    of_norm: dict[str, Any],
    normalized_sum: Callable[[Tensor, Tensor], Any],
    inputs: Tensor,
    backprops: Tensor,
) -> list[Dense] | None:
    """Of the weight, where that is trained, and the bias, likewise; ``of_norm``: what ``kernels.normalized_sum`` is
    called with by ``normalized_sum``."""
    if inputs.dim() != 3 or inputs.shape[2] != width:
        inputs, backprops = (_as_rows(x, width, x.dtype) for x in (inputs, backprops))
    found = normalized_sum(inputs, backprops)
    if found is None:
        return None
    sums_of = [(found.sums, found.error, 1.0)] if with_weight else []
    if of_norm["bias"]:
        sums_of.append((found.bias, found.row_norm_backprops, of_norm["added"]))
    return [
        Dense(values if len(shape) == 1 else values.view(-1, *shape), SumError((error,), (0.0,), scale, lost))
        for shape, (values, error, scale) in zip(shapes, sums_of, strict=True)
    ]


# --- samples with few entries: in fp64, which takes fewer calls than a bound of what fp32 makes of them ---

_FEW = 2**15
"""Entries of a sample up to which calls take the time."""


def _is_taken_in_fp64(inputs: Tensor, backprops: Tensor, eps: float) -> bool:
    few = inputs.shape[1:].numel() <= _FEW and inputs.device.type == "cpu" and eps >= _SMALL_EPS
    return few and accumulating_dtype(inputs, backprops) is torch.float32


def _factors_in_fp64(
    layer: Any, again: Again, inputs: Tensor, backprops: Tensor, width: int
) -> dict[nn.Parameter, Factor]:
    of = (id(inputs), id(backprops)) if inputs.dim() in (2, 3) and inputs.shape[-1] == width else (0, 0)
    as_given = backprops
    inputs, rows = (_as_rows(x, width, x.dtype) for x in (inputs, backprops))
    return _factors(layer, lambda: _weighted_in_fp64(again, inputs, rows, of), as_given if of[1] else rows)


def _weighted_in_fp64(again: Again, inputs: Tensor, backprops: Tensor, of: tuple[int, int]) -> Dense:
    """``Σ_t b_t ∘ x̂_t`` of inputs and backprops (N, T, D), by ``again``.

    Numerics:
        An entry of x̂_t is at most √D and, in fp64, exact to ``2·γ(D + 8)·r_t`` times (1 + itself), with
        ``r_t = 1 + |mean|/deviation``, less than 2³⁰ for such x. The sum is rounded once to fp32. So it is off by
        ``Σ_t r_t ‖b_t‖`` times what is ``relative``; all else is small to that.
    """
    _, positions, width = backprops.shape
    root, double = width**0.5, torch.float64
    in_fp64 = (1.0 + root) * (2.0 * bounds.gamma(width + 8, double) + bounds.gamma(positions + 1, double))
    relative = 1.01 * (in_fp64 + root * bounds.gamma(1, torch.float32))
    values, norms = again(inputs, backprops, taken_once(sums.raw_row_norm, backprops))
    lost = (*(1.0 for _ in norms[1:]), sums.lost_to_underflow(backprops))
    found = Dense(values, SumError(norms, lost, relative, root * smallest_normal(torch.float32)))
    found.again, found.of = again, of
    return found


_Summed = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Inputs and backprops (N, T, D) -> the sums (N, D), and statistics of the rows, in fp64."""


def _in_parts(summed: _Summed, norms: Callable[..., tuple[Tensor, ...]]) -> Again:
    """A few samples at a time: fp64 takes twice the memory, which the caches and the allocator hold then.

    Args:
        norms: of the statistics, (N, T) each, beside those of the backprops' rows.
    """

    def in_parts(inputs: Tensor, backprops: Tensor, row_norms: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        n, entries = inputs.shape[0], inputs.numel()
        at_once = _AT_ONCE * torch.get_num_threads()
        if entries <= at_once or is_traced():
            values, *statistics = summed(inputs, backprops)
        else:
            samples = max(1, at_once * n // entries)
            parts = map(summed, inputs.split(samples), backprops.split(samples))
            values, *statistics = map(torch.cat, zip(*parts, strict=True))
        return values.float(), (*norms(*statistics), row_norms)

    return in_parts


_AT_ONCE = 2**15
"""Entries a thread: fp64 copies of more would be a part of what a small model holds at most."""


def _layer_norm_again(width: int, eps: float) -> Again:
    def summed(inputs: Tensor, backprops: Tensor) -> tuple[Tensor, ...]:
        if is_traced():  # in two sums: torch 2.8's Inductor has no way to one pass from 16 bits
            x = inputs.double()
            mean = x.mean(2, keepdim=True)
            centred = x - mean
            rstd = (centred.square().mean(2, keepdim=True) + eps).rsqrt()
            return (centred * rstd * backprops).sum(1), mean, rstd
        normalized, mean, rstd = torch.native_layer_norm(inputs.double(), [width], None, None, eps)
        return normalized.mul_(backprops).sum(1), mean, rstd

    return _in_parts(summed, lambda mean, rstd: (mean.mul_(rstd).abs_().squeeze(-1).float(),))


def _rms_norm_again(width: int, eps: float) -> Again:
    def summed(inputs: Tensor, backprops: Tensor) -> tuple[Tensor, ...]:
        x = inputs.double()
        rstd = torch.linalg.vector_norm(x, dim=2, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        return (x.mul_(rstd).mul_(backprops).sum(1),)

    return _in_parts(summed, lambda: ())


@register_rule(nn.LayerNorm, fresh=True, alike=lambda layer: (layer.normalized_shape, layer.eps))
def layer_norm(layer: nn.LayerNorm, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, ..., *normalized_shape).

    Numerics:
        Mean and variance come from sums of D terms in any order, the variance as the mean square of what is left of
        the mean; the relative error of x̂ is at most γ(D + 8)·(1 + |mean|/deviation), twice over. Of a constant row x̂ is
        0; where eps is small, such rows are looked for, because the error would be as large as 1/√eps.
    """
    width = math.prod(layer.normalized_shape)
    if _is_taken_in_fp64(activations[0], backprops, layer.eps):
        return _factors_in_fp64(layer, _layer_norm_again(width, layer.eps), activations[0], backprops, width)
    by_kernel = _factors_by_kernel(layer, activations[0], backprops, width, layer.eps, mean=True)
    if by_kernel is not None:
        return by_kernel
    dtype = accumulating_dtype(activations[0], backprops)
    inputs, backprops = (_as_rows(x, width, dtype) for x in (activations[0], backprops))
    normalized, mean, rstd = torch.native_layer_norm(inputs, [width], None, None, layer.eps)
    error = 2.0 * bounds.gamma(width + 8, dtype) * (1.0 + (mean * rstd).abs())
    error = _where_known(error, rstd, layer.eps, dtype)
    if layer.eps < _SMALL_EPS:
        constant = _is_constant(inputs)
        if constant is not None:
            normalized, error = normalized.masked_fill(constant, 0.0), error.masked_fill(constant, 0.0)
    return _factors(layer, lambda: _weighted(normalized, backprops, error.squeeze(-1)), backprops)


def _forward(parameters: Mapping[str, Any], layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    weight = parameters.get("weight")
    output, mean, rstd = torch.native_layer_norm(x, layer.normalized_shape, weight, parameters.get("bias"), layer.eps)
    return output, (mean, rstd, weight)


def _backward(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    of_input, _, _ = torch.ops.aten.native_layer_norm_backward.default(
        gradient, x, weight.shape, mean, rstd, weight, None, [True, False, False]
    )
    return of_input


register_node(nn.LayerNorm, _forward, _backward)


def rms_norm(layer: Any, inputs: Tensor, backprops: Tensor, width: int, eps: float) -> dict[nn.Parameter, Factor]:
    """``x̂ = x / √(mean x² + eps)``; inputs and backprops (N, ..., *shape) with ``width`` entries in the shape."""
    if _is_taken_in_fp64(inputs, backprops, eps):
        return _factors_in_fp64(layer, _rms_norm_again(width, eps), inputs, backprops, width)
    by_kernel = _factors_by_kernel(layer, inputs, backprops, width, eps, mean=False)
    if by_kernel is not None:
        return by_kernel
    dtype = accumulating_dtype(inputs, backprops)
    inputs, backprops = (_as_rows(x, width, dtype) for x in (inputs, backprops))
    rstd = torch.rsqrt(inputs.square().mean(-1, keepdim=True) + eps)
    error = _where_known(torch.full_like(rstd, bounds.gamma(width + 8, dtype)), rstd, eps, dtype)
    if eps < _least_eps(dtype):
        error = error.masked_fill(~_bits(inputs).any(-1, keepdim=True), 0.0)  # a row of zeros
    return _factors(layer, lambda: _weighted(inputs * rstd, backprops, error.squeeze(-1)), backprops)


@register_rule(nn.RMSNorm, fresh=True, alike=lambda layer: (layer.weight.shape, layer.eps))
def torch_rms_norm(layer: nn.RMSNorm, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, ..., *normalized_shape)."""
    eps = eps_of_torch(activations[0]) if layer.eps is None else layer.eps
    return rms_norm(layer, activations[0], backprops, layer.weight.numel(), eps)


def eps_of_torch(inputs: Tensor) -> float:
    """What torch's RMS norm adds where no eps is given: of 16-bit inputs, too, that of what it computes in."""
    return torch.finfo(accumulating_dtype(inputs)).eps


@register_rule(nn.GroupNorm, fresh=True)
def group_norm(layer: Any, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, C, *spatial)."""
    return _by_channel(layer, activations[0], backprops, layer.num_groups, layer.eps)


@register_rule((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), fresh=True)
def instance_norm(layer: nn.InstanceNorm2d, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, C, *spatial)."""
    if layer.track_running_stats:
        raise UnsupportedModuleError(
            "it keeps running statistics of the samples, which are not private; build it with track_running_stats=False"
        )
    return _by_channel(layer, activations[0], backprops, layer.num_features, layer.eps)


def _by_channel(
    layer: Any, inputs: Tensor, backprops: Tensor, num_groups: int, eps: float
) -> dict[nn.Parameter, Factor]:
    """Statistics over the channels of a group and all positions; weight and bias by channel.

    Numerics:
        x̂ as torch computes it is brought to mean 0 and variance 1 - ε once more, in fp64 and by two numbers a group:
        with mean m and mean square q of x̂, ``G = (Σ_t b x̂ - m Σ_t b) / √(q - m² + ε·rstd²)``. So torch's statistics
        need not be exact, only its products; all sums are of short blocks (``sums.sum_block``).
    """
    dtype = accumulating_dtype(inputs, backprops)
    n, channels = inputs.shape[:2]
    positions = inputs.shape[2:].numel()
    backprops = backprops.to(dtype).reshape(n, channels, positions).contiguous()
    norm_b, chain, bias_sums = sums.row_norm(backprops), sums.sum_block(positions), None
    factors: dict[nn.Parameter, Factor] = {}
    if layer.weight is not None and layer.weight.requires_grad:
        x = inputs.to(dtype).contiguous()
        x, mean, rstd = torch.native_group_norm(x, None, None, n, channels, positions, num_groups, eps)
        x = x.reshape(n, channels, positions)
        by_group = (n, num_groups, channels // num_groups)
        squares, totals = (s.view(by_group) for s in sums.sums_of_products(x, x))
        size = max(1, by_group[2] * positions)
        m, q = (s.sum(-1, keepdim=True) / size for s in (totals, squares))
        again = torch.rsqrt(q - m.square() + eps * rstd.double().square().unsqueeze(-1))
        products, bias_sums = sums.sums_of_products(x, backprops)
        products, b = products.view(by_group), bias_sums.view(by_group)
        values = (products - m * b) * again
        # Of the sums over blocks, m and q among them, and of x̂ = x·rstd - mean·rstd, whose two terms may cancel.
        cancelled = (mean * rstd).abs().double().unsqueeze(-1)
        relative = bounds.gamma(chain + 12, dtype) + bounds.gamma(4, dtype) * cancelled
        row_products = norm_b.view(by_group) * (squares.sqrt() + positions**0.5)
        error = relative * ((row_products + b.abs()) * again + 2.0 * values.abs())
        error = _where_known(error, rstd.unsqueeze(-1), eps, dtype)
        if eps < _SMALL_EPS and positions:
            constant = _is_constant(inputs.to(dtype).reshape(n, num_groups, size))
            if constant is not None:
                values, error = values.masked_fill(constant, 0.0), error.masked_fill(constant, 0.0)
        factors[layer.weight] = Dense(values.view(n, channels).to(dtype), error=error.flatten(1).norm(dim=1))
    if layer.bias is not None and layer.bias.requires_grad:
        factors[layer.bias] = channel_sum(backprops, norm_b, bias_sums)
    return factors
