"""Attention within windows that uses its children's weights and a table of relative positions as it pleases, folded
samples and all: one rule answers for each such layer with all that is in it, by vmap."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpfast.factors import Factor
from dpfast.rules.functorch import functorch
from dpfast.taps import Activations, register_rule, runs_again

_ATTENTIONS = [
    *(f"torchvision.models.swin_transformer.ShiftedWindowAttention{version}" for version in ("", "V2")),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d",
    *("timm.models.maxxvit.Attention2d", "timm.models.maxxvit.AttentionCl"),
    "timm.models.swin_transformer_v2.WindowAttention",
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention",
    "transformers.models.swin.modeling_swin.SwinAttention",
    "transformers.models.swinv2.modeling_swinv2.Swinv2Attention",
    "transformers.models.donut.modeling_donut_swin.DonutSwinAttention",
    "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwinAttention",
]


@register_rule(_ATTENTIONS, whole=True)
@runs_again
def window_attention(layer: nn.Module, activations: Activations, backprops: Any) -> dict[nn.Parameter, Factor]:
    """activations[0] and backprops (N, ...), or (k·N, T, D) with a sample's windows together."""
    return functorch(layer, activations, backprops)
