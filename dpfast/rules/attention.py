"""nn.MultiheadAttention as it is: its forward in pieces, because it uses the weights of its projections functionally.

Also where nn.Transformer's layers have their samples, which they say themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast.arithmetic import accumulating_dtype
from dpfast.errors import InputError
from dpfast.factors import Blocks, Dense, Factor, OuterProduct, row_sum
from dpfast.taps import Activations, Pieces, register_batch_dim, register_forward

_DPMHA = "opacus.layers.dp_multihead_attention.DPMultiheadAttention"


@register_batch_dim((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, _DPMHA))
def of_layer(layer: nn.Module) -> int:
    """A layer of nn.Transformer, and Opacus's attention."""
    attention = getattr(layer, "self_attn", layer)
    return 0 if attention.batch_first else 1


@register_batch_dim((nn.TransformerEncoder, nn.TransformerDecoder))
def of_stack(stack: Any) -> int:
    """What its layers say; a stack has a norm of its own beside them."""
    return of_layer(stack.layers[0]) if len(stack.layers) else 0


@register_batch_dim(nn.Transformer)
def of_transformer(transformer: nn.Transformer) -> int:
    """It is told at construction."""
    return 0 if transformer.batch_first else 1


@register_forward(nn.MultiheadAttention)
def multihead_attention(
    layer: nn.MultiheadAttention,
    piece: Pieces,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As nn.MultiheadAttention; its random numbers are drawn in the same order."""
    if query.dim() != 3:
        raise InputError(f"MultiheadAttention: its query {tuple(query.shape)} has no dimension of samples")
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    is_self = query is key and key is value
    if not layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = _projected(layer, piece, query, key, value, is_self)
    mask = mask_of_scores(layer, query, key, key_padding_mask, attn_mask)
    if layer.bias_k is not None:
        biases: Any = (layer.bias_k, layer.bias_v)
        k, v = (
            torch.cat([x, piece(_repeated_gradient, _repeated, [bias], x)], dim=1)
            for x, bias in zip((k, v), biases, strict=True)
        )
        mask = None if mask is None else F.pad(mask, (0, 1))
    if layer.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))
    mixed, weights = attended(layer, q, k, v, mask, need_weights)
    out: list[Any] = [layer.out_proj.weight, layer.out_proj.bias]
    output = piece(_linear_gradient, F.linear, out, mixed)
    if not layer.batch_first:
        output = output.transpose(0, 1)
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    return output, weights


def _projected(
    layer: nn.MultiheadAttention, piece: Pieces, query: Tensor, key: Tensor, value: Tensor, is_self: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, T, E) each."""
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    if weight is not None and is_self:
        return piece(_linear_gradient, F.linear, [weight, bias], query).chunk(3, dim=-1)
    if weight is not None:
        return piece(_packed_gradient, _packed, [weight, bias], query, key, value)
    weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    return piece(_separate_gradient, _separate, [*weights, bias], query, key, value)


def mask_of_scores(
    layer: Any,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor | None:
    """What is added to the scores of a layer with ``num_heads``, (N or 1, heads or 1, T, S); a boolean mask is True
    where nothing may pass."""
    n, t, s = query.shape[0], query.shape[1], key.shape[1]

    def added(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(query.dtype)
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))

    total = None
    if attn_mask is not None:
        expected = ((t, s), (n * layer.num_heads, t, s))
        if tuple(attn_mask.shape) not in expected:
            raise InputError(f"attn_mask {tuple(attn_mask.shape)} is not one of {expected}")
        total = added(attn_mask).view(-1, layer.num_heads if attn_mask.dim() == 3 else 1, t, s)
    if key_padding_mask is not None:
        padding = added(key_padding_mask).view(n, 1, 1, s)
        total = padding if total is None else total + padding
    return total


def attended(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """(N, T, E) and the weights (N, heads, T, S) where asked for, of a layer with ``num_heads``, ``dropout`` and
    ``training``."""
    q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    dropout = layer.dropout if layer.training else 0.0
    if not need_weights:
        if mask is not None:
            mask = mask.expand(q.shape[0], layer.num_heads, q.shape[2], k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return mixed.transpose(1, 2).flatten(2), None
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    # Apart from what attends, as torch's are: a hook on what the layer gives is none on that.
    return (weights @ v).transpose(1, 2).flatten(2), weights.view_as(weights)


# --- the pieces and their gradients ---


def _linear_gradient(
    parameters: Sequence[nn.Parameter | None], activations: Activations, backprops: Tensor
) -> Mapping[Any, Factor]:
    weight, bias = parameters
    return {weight: OuterProduct(activations[0], backprops), bias: row_sum(backprops)}


def _packed(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(map(F.linear, (query, key, value), weight.chunk(3), biases))


def _packed_gradient(
    parameters: Sequence[nn.Parameter | None], activations: Activations, backprops: Sequence[Tensor]
) -> Mapping[Any, Factor]:
    weight, bias = parameters
    return {
        weight: Blocks([OuterProduct(a, b) for a, b in zip(activations, backprops, strict=True)]),
        bias: Blocks([row_sum(b) for b in backprops]),
    }


def _separate(query: Tensor, key: Tensor, value: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    *weights, bias = parameters
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(map(F.linear, (query, key, value), weights, biases))


def _separate_gradient(
    parameters: Sequence[nn.Parameter | None], activations: Activations, backprops: Sequence[Tensor]
) -> Mapping[Any, Factor]:
    *weights, bias = parameters
    found = {w: OuterProduct(a, b) for w, a, b in zip(weights, activations, backprops, strict=True)}
    return {**found, bias: Blocks([row_sum(b) for b in backprops])}


def _repeated(like: Tensor, bias: Tensor) -> Tensor:
    """One more position of every sample: bias (1, 1, E) -> (N, 1, E)."""
    return bias.repeat(like.shape[0], 1, 1)


def _repeated_gradient(
    parameters: Sequence[nn.Parameter | None], activations: Activations, backprops: Tensor
) -> Mapping[Any, Factor]:
    (bias,) = parameters
    return {bias: Dense(backprops.to(accumulating_dtype(backprops)).unsqueeze(1))}
