"""Linear layers: ``y = x Wᵀ + b``, so ``G_n = Σ_t b_nt a_ntᵀ`` and ``g_n = Σ_t b_nt``."""

from __future__ import annotations

from torch import Tensor, nn

from dpfast.errors import InputError
from dpfast.factors import Factor, OuterProduct, row_sum
from dpfast.registry import Activations, register_rule


def check_linear(layer: nn.Linear, activations: Tensor, backprops: Tensor) -> None:
    """Raises InputError where the widths are not the layer's."""
    widths = (activations.shape[-1] if activations.dim() else 0, backprops.shape[-1] if backprops.dim() else 0)
    if widths != (layer.in_features, layer.out_features):
        raise InputError(
            f"{layer}: activations {tuple(activations.shape)} and backprops {tuple(backprops.shape)} do not fit a "
            f"layer of {layer.in_features} in-features and {layer.out_features} out-features"
        )


@register_rule(nn.Linear)
def linear(layer: nn.Linear, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, ..., D), backprops (N, ..., P)."""
    check_linear(layer, activations[0], backprops)
    factors: dict[nn.Parameter, Factor] = {}
    if layer.weight.requires_grad:
        factors[layer.weight] = OuterProduct(activations[0], backprops, where=str(layer))
    if layer.bias is not None and layer.bias.requires_grad:
        factors[layer.bias] = row_sum(backprops)
    return factors
