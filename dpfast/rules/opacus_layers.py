"""Opacus's own layers. The recurrent ones have torch's parameters, so torch's forward runs, in our pieces.

(The layers are made of one linear layer a time step, which packed sequences call with ever fewer samples.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpfast.rules.recurrent import packed_one_by_one, recurrent
from dpfast.taps import Pieces, register_by_row, register_fault, register_forward


class _AsTorch:
    """A DPRNN, DPGRU or DPLSTM with the attributes of torch's class that it lacks."""

    proj_size = 0

    def __init__(self, layer: Any):
        kind = type(layer).__name__.removeprefix("DP")
        self.layer = layer
        self.mode = f"RNN_{layer.cells[0].nonlinearity.upper()}" if kind == "RNN" else kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __repr__(self) -> str:
        return repr(self.layer)


_RECURRENT = [f"opacus.layers.dp_rnn.{name}" for name in ("DPRNN", "DPGRU", "DPLSTM")]


@register_forward(_RECURRENT)
def opacus_recurrent(
    layer: nn.Module, piece: Pieces, input: Tensor | PackedSequence, state_init: Any = None
) -> tuple[Any, ...]:
    """As the class's forward."""
    return recurrent(_AsTorch(layer), piece, input, state_init)


@register_by_row(_RECURRENT)
def opacus_one_by_one(layer: nn.Module, input: Tensor | PackedSequence, state_init: Any = None) -> Any:
    """As for torch's own."""
    if not isinstance(input, PackedSequence):
        return type(layer).forward(layer, input, state_init)
    return packed_one_by_one(_AsTorch(layer), input, state_init)


_ATTENTION = "opacus.layers.dp_multihead_attention.DPMultiheadAttention"


@register_fault(_ATTENTION)
def fault_of_attention(layer: nn.Module) -> str | None:
    """With batch_first its projections see samples first, and what adds a bias to keys and values positions first."""
    if not (layer.batch_first and layer.add_bias_kv):
        return None
    return (
        "with batch_first=True and add_bias_kv=True one of its layers takes positions for samples; use "
        "nn.MultiheadAttention, which needs no replacement here, or batch_first=False"
    )
