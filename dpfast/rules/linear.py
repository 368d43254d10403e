"""Linear layers: ``y = x Wᵀ + b``, so ``G_n = Σ_t b_nt a_ntᵀ`` and ``g_n = Σ_t b_nt``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast.arithmetic import accumulating_dtype, buffers, ops, products
from dpfast.errors import InputError
from dpfast.factors import Factor, OuterProduct, Reshaped, row_sum
from dpfast.taps import Activations, register_node, register_rule


@register_rule(
    nn.Linear,
    fresh=True,
    alike=lambda layer: (layer.in_features, layer.out_features),
    without_input=["bias"],
)
def linear(layer: nn.Linear, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, ..., D), backprops (N, ..., P)."""
    factors: dict[nn.Parameter, Factor] = {}
    if layer.weight.requires_grad:
        factor = OuterProduct(activations[0], backprops, where=layer)
        factors[layer.weight] = factor  # type: ignore[index]  # torch declares a Tensor
    else:
        ops.as_rows(activations[0], backprops, where=layer)
    _check_widths(layer, activations[0], backprops)
    if layer.bias is not None and layer.bias.requires_grad:
        factors[layer.bias] = row_sum(backprops)
    return factors


def _forward(parameters: Mapping[str, Any], layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    weight: Any = parameters.get("weight")
    bias = parameters.get("bias")
    output = products.of_layer(x, weight, bias)
    if output is not None:
        return output, (weight,)
    if bias is None or x.dim() > 3 or not x.is_contiguous():
        return F.linear(x, weight, bias), (weight,)
    *shape, d = x.shape
    place = buffers.place_for_others(x.shape[:-1].numel(), weight.shape[0], x)
    if place is None:
        return F.linear(x, weight, bias), (weight,)
    return torch.addmm(bias, x.view(-1, d), weight.t(), out=place).view(*shape, -1), (weight,)  # F.linear's own call


def _backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rows = gradient if gradient.dim() == 2 else gradient.reshape(-1, weight.shape[0])
    of_input = products.of_layer(rows, weight, transposed=True)
    if of_input is None:
        of_input = torch.mm(rows, weight, out=buffers.place_for_others(rows.shape[0], weight.shape[1], rows))
    return of_input if gradient.dim() == 2 else of_input.view(x.shape)


register_node(nn.Linear, _forward, _backward)


def compute_linear_grad_sample(
    layer: nn.Linear, activations: Sequence[Tensor] | Tensor, backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a Linear layer, by the contract of Opacus's grad samplers.

    Maths:
        ``G_n = Σ_t b_nt a_ntᵀ`` for the weight, ``g_n = Σ_t b_nt`` for the bias, in one pass.

    Args:
        layer: the layer; frozen parameters are left out of the answer.
        activations: its input (N, ..., D), alone or as a list of one; bf16, fp16, fp32 or fp64. Read only.
        backprops: (N, ..., P), dtype may differ from the activations'. Read only.

    Returns:
        {layer.weight: (N, P, D), layer.bias: (N, P)}, fp32 (fp64 where an input is fp64) whatever the layer's dtype.

    Raises:
        InputError: shapes that are not the layer's or not each other's, devices that differ, dtypes that are not
            floating point.

    >>> import torch
    >>> layer, a, b = nn.Linear(3, 2), torch.ones(4, 3), torch.ones(4, 2)
    >>> [tuple(g.shape) for g in compute_linear_grad_sample(layer, a, b).values()]
    [(4, 2, 3), (4, 2)]
    """
    (inputs,) = (activations,) if isinstance(activations, Tensor) else activations
    ops.as_rows(inputs, backprops, where=layer)
    _check_widths(layer, inputs, backprops)
    with_weight = layer.weight.requires_grad
    with_bias = layer.bias is not None and layer.bias.requires_grad
    if with_weight and with_bias:
        weight, bias = ops.grad_sample(inputs, backprops, bias=True)
        return {layer.weight: weight, layer.bias: bias}  # type: ignore[dict-item]  # torch declares a Tensor
    if with_weight:
        return {layer.weight: ops.grad_sample(inputs, backprops)}  # type: ignore[dict-item]  # torch declares a Tensor
    return {layer.bias: row_sum(backprops).materialize()} if with_bias else {}


def compute_linear_norm_sample(
    layer: nn.Linear, activations: Sequence[Tensor] | Tensor, backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """L2 norms of the per-sample gradients of a Linear layer, by the contract of Opacus's norm samplers.

    Args, Raises: as :func:`compute_linear_grad_sample`; any number of dimensions between the first and the last.

    Returns:
        {layer.weight: (N,), layer.bias: (N,)}, fp32 (fp64 where an input is fp64); no gradient is written out.
    """
    (inputs,) = (activations,) if isinstance(activations, Tensor) else activations
    factors = linear(layer, Activations([inputs]), backprops)
    dtype = accumulating_dtype(inputs, backprops)
    return {p: factor.sq_norm().value.sqrt().to(dtype) for p, factor in factors.items()}


def _check_widths(layer: nn.Linear, activations: Tensor, backprops: Tensor) -> None:
    """Raises InputError, with the layer's name, where the widths are not the layer's."""
    if (activations.shape[-1], backprops.shape[-1]) != (layer.in_features, layer.out_features):
        raise InputError(
            f"{layer}: activations {tuple(activations.shape)} and backprops {tuple(backprops.shape)} do not fit a "
            f"layer of {layer.in_features} in-features and {layer.out_features} out-features"
        )


@register_rule("transformers.pytorch_utils.Conv1D", fresh=True, alike=lambda layer: (), without_input=["bias"])
def transposed_linear(layer: Any, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """Hugging Face's Conv1D, a Linear whose weight is (D, P): G_n = Σ_t a_nt b_ntᵀ."""
    factors: dict[nn.Parameter, Factor] = {}
    if layer.weight.requires_grad:
        factors[layer.weight] = OuterProduct(backprops, activations[0], where=type(layer).__name__)
    if layer.bias.requires_grad:
        factors[layer.bias] = row_sum(backprops)
    return factors


def _forward_transposed(parameters: Mapping[str, Any], layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    weight, bias = parameters["weight"], parameters["bias"]
    output = products.of_layer(x, weight, bias, transposed=True)
    if output is None:
        output = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
    return output.view(*x.shape[:-1], layer.nf), (weight,)


def _backward_transposed(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _backward(gradient, x, weight.mT)


register_node("transformers.pytorch_utils.Conv1D", _forward_transposed, _backward_transposed)


@register_rule(nn.Bilinear, fresh=True)
def bilinear(layer: nn.Bilinear, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """``y_p = x₁ᵀ W_p x₂ + b_p``: a Linear on the products x₁ ⊗ x₂, activations (N, ..., D₁) and (N, ..., D₂)."""
    factors: dict[nn.Parameter, Factor] = {}
    if layer.weight.requires_grad:
        dtype = accumulating_dtype(*activations)
        first, second = (x.to(dtype) for x in activations)
        products = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
        factor = Reshaped(OuterProduct(products, backprops, where=layer), layer.weight.shape)
        factors[layer.weight] = factor  # type: ignore[index]  # torch declares a Tensor
    if layer.bias is not None and layer.bias.requires_grad:
        factors[layer.bias] = row_sum(backprops)
    return factors
