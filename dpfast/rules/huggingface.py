"""Layers of Hugging Face's transformers, by name: nothing of it is imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpfast.factors import Factor, Lookup
from dpfast.rules.normalization import rms_norm
from dpfast.taps import Activations, register_broadcast, register_folded, register_rule

_MODELS = "transformers.models"
_RMS_NORMS = [
    *("llama.modeling_llama.LlamaRMSNorm", "mistral.modeling_mistral.MistralRMSNorm"),
    *("mixtral.modeling_mixtral.MixtralRMSNorm", "phi3.modeling_phi3.Phi3RMSNorm"),
    *("qwen2.modeling_qwen2.Qwen2RMSNorm", "qwen3.modeling_qwen3.Qwen3RMSNorm"),
    *("t5.modeling_t5.T5LayerNorm", "mt5.modeling_mt5.MT5LayerNorm"),
    "switch_transformers.modeling_switch_transformers.SwitchTransformersLayerNorm",
]


@register_rule([f"{_MODELS}.{name}" for name in _RMS_NORMS], fresh=True)
def root_mean_square(layer: Any, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, ..., D); x̂ is taken in fp32."""
    return rms_norm(layer, activations[0], backprops, layer.weight.numel(), layer.variance_epsilon)


@register_rule(f"{_MODELS}.opt.modeling_opt.OPTLearnedPositionalEmbedding", fresh=True)
def opt_positions(layer: Any, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations: attention mask (N, T), the length of what is cached, position ids (N, T) or None."""
    names = ("attention_mask", "past_key_values_length", "position_ids")
    given = {**dict(zip(names, activations, strict=False)), **activations.kwargs}
    positions = given.get("position_ids")
    if positions is None:
        mask = given["attention_mask"]
        positions = (mask.cumsum(1) * mask - 1).long()[:, given.get("past_key_values_length") or 0 :]
    return {layer.weight: Lookup(positions + layer.offset, backprops, layer.num_embeddings, layer.padding_idx)}


# Its feed-forward layers see the tokens of all samples in one row.
register_folded(f"{_MODELS}.opt.modeling_opt.OPTDecoderLayer")

# Tables of relative positions, (1, heads, T, T), that every sample's attention scores add.
register_broadcast(
    [
        f"{_MODELS}.t5.modeling_t5.T5Attention",
        f"{_MODELS}.mt5.modeling_mt5.MT5Attention",
        f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersAttention",
    ],
    method="compute_bias",
    child="relative_attention_bias",
)
