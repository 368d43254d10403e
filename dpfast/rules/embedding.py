"""Embeddings: a look-up in a table of rows, and bags of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import accumulating_dtype
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.factors import Factor, Lookup
from dpfast.taps import Activations, bags_in_rows, picked_or_zeros, register_node, register_rule


def _likeness(layer: nn.Embedding) -> Hashable:
    """None of a GPU's: kernels take them one by one."""
    mixes = layer.scale_grad_by_freq or layer.max_norm is not None
    return None if mixes or layer.weight.device.type != "cpu" else (layer.weight.shape, layer.padding_idx)


@register_rule(nn.Embedding, fresh=True, alike=_likeness)
def embedding(layer: nn.Embedding, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, ...) indices, backprops (N, ..., D)."""
    _refuse_mixing(layer)
    if not layer.weight.requires_grad:
        return {}
    if activations[0].dim() == 0:
        raise InputError("its input has no dimension of samples")
    factor = Lookup(activations[0], backprops, len(layer.weight), layer.padding_idx)
    return {layer.weight: factor}  # type: ignore[dict-item]  # torch declares a Tensor


def _forward(parameters: Mapping[str, Any], layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    return torch.embedding(parameters.get("weight"), x, padding, False, False), ()  # type: ignore[arg-type]


register_node(nn.Embedding, _forward, None, names=("weight",), rank=1)


@register_rule(nn.EmbeddingBag, fresh=True)
def embedding_bag(layer: nn.EmbeddingBag, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations: indices (N, T), or all bags in one row with their offsets, and weights; backprops (N, D).

    Maths:
        position t adds ``w_t · b_n`` (sum), ``b_n / count_n`` (mean), or b_n's entries where it is the largest (max).
    """
    _refuse_mixing(layer)
    if not layer.weight.requires_grad:
        return {}
    names = ("input", "offsets", "per_sample_weights")
    given = {**dict(zip(names, activations, strict=False)), **activations.kwargs}
    inputs: list[Any] = [given.get(name) for name in names]
    indices, inside, weights = _bags(layer, *inputs)
    if layer.padding_idx is not None:
        inside = inside & (indices != layer.padding_idx)
    backprops = backprops.to(accumulating_dtype(backprops)).unsqueeze(1)
    if layer.mode == "max":
        values = layer.weight.detach()[indices].masked_fill(~inside.unsqueeze(-1), float("-inf"))
        positions = torch.arange(indices.shape[1], device=indices.device).view(1, -1, 1)
        largest = values.argmax(1, keepdim=True) if indices.shape[1] else positions[:, :0]
        rows = backprops * (positions == largest)
    elif layer.mode == "mean":
        rows = (backprops / inside.sum(1).clamp(min=1).view(-1, 1, 1)).expand(-1, indices.shape[1], -1)
    else:
        rows = backprops.expand(-1, indices.shape[1], -1)
        if weights is not None:
            rows = rows * weights.to(rows.dtype).unsqueeze(-1)
    rows = rows.masked_fill(~inside.unsqueeze(-1), 0.0)
    factor = Lookup(indices, rows, len(layer.weight))
    return {layer.weight: factor}  # type: ignore[dict-item]  # torch declares a Tensor


def _bags(
    layer: nn.EmbeddingBag, indices: Tensor, offsets: Any, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices (N, T), which of them are in the bag, and their weights; bags of different sizes are filled up."""
    if indices.dim() == 2:
        return indices, torch.ones_like(indices, dtype=torch.bool), weights
    source, inside = bags_in_rows(indices.numel(), offsets, ended=layer.include_last_offset)
    weights = None if weights is None else picked_or_zeros(weights, source)
    return picked_or_zeros(indices, source), inside, weights


def _refuse_mixing(layer: nn.Embedding | nn.EmbeddingBag) -> None:
    if layer.scale_grad_by_freq or layer.max_norm is not None:
        raise UnsupportedModuleError(
            f"{layer}: scale_grad_by_freq and max_norm make a sample's gradient depend on the others in its batch; "
            "build the layer without them"
        )
