"""What dpfast knows of each layer type: one file a family, each registering its rules when imported."""

from dpfast.rules import (
    attention,
    convolution,
    copies,
    embedding,
    functorch,
    huggingface,
    linear,
    normalization,
    opacus_layers,
    recurrent,
    refused,
)

__all__ = [
    "attention",
    "convolution",
    "copies",
    "embedding",
    "functorch",
    "huggingface",
    "linear",
    "normalization",
    "opacus_layers",
    "recurrent",
    "refused",
]
