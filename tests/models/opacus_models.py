"""Opacus's own layers."""

import torch
from harness import Model


def _of(name, *sizes, **options):
    def build():
        from opacus import layers

        return getattr(layers, name)(*sizes, **options)

    return build


def _attention():
    from opacus.layers import DPMultiheadAttention
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = DPMultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x)[0]

    return Attention()


def _sequence(n, t):
    return (torch.randn(n, t, 4),)


MODELS = {
    "DPMultiheadAttention": Model(_attention, lambda n, t: (torch.randn(n, t, 8),)),
    "DPLSTM": Model(_of("DPLSTM", 4, 6, num_layers=2, bidirectional=True, batch_first=True), _sequence),
    "DPGRU": Model(_of("DPGRU", 4, 6, batch_first=True), _sequence),
    "DPRNN": Model(_of("DPRNN", 4, 6, batch_first=True), _sequence),
    "SequenceBias": Model(_of("SequenceBias", 4, batch_first=True), _sequence),
}
