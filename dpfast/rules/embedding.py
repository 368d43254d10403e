"""Embeddings: a lookup in a table of rows."""

from __future__ import annotations

from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Factor, Lookup
from dpfast.registry import Activations, register_rule


@register_rule(nn.Embedding)
def embedding(layer: nn.Embedding, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, ...) indices, backprops (N, ..., D)."""
    if layer.scale_grad_by_freq or layer.max_norm is not None:
        raise UnsupportedModuleError(
            f"{layer}: scale_grad_by_freq and max_norm make a sample's gradient depend on the others in its batch; "
            "build the layer without them"
        )
    if not layer.weight.requires_grad:
        return {}
    return {layer.weight: Lookup(activations[0], backprops, layer.num_embeddings, layer.padding_idx)}
