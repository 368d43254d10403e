"""Normalisation within a sample: ``y = w ∘ x̂ + b``, so ``G_n = Σ_t b_nt ∘ x̂_nt`` and ``g_n = Σ_t b_nt``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast.factors import Dense, Factor
from dpfast.reference import compute_dtype
from dpfast.registry import Activations, register_rule


def _summed(values: Tensor, shape: torch.Size) -> Tensor:
    """(N, ..., *shape) -> (N, *shape)."""
    positions = tuple(range(1, values.dim() - len(shape)))
    return values.sum(dim=positions) if positions else values


@register_rule(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, ..., *normalized_shape)."""
    dtype = compute_dtype(activations[0], backprops)
    backprops = backprops.to(dtype)
    factors: dict[nn.Parameter, Factor] = {}
    if layer.weight is not None and layer.weight.requires_grad:
        normalized = F.layer_norm(activations[0].to(dtype), layer.normalized_shape, eps=layer.eps)
        factors[layer.weight] = Dense(_summed(normalized.mul_(backprops), layer.weight.shape))
    if layer.bias is not None and layer.bias.requires_grad:
        factors[layer.bias] = Dense(_summed(backprops, layer.bias.shape))
    return factors
