"""What dpfast knows of each layer type: one file a family, each registering its rules when imported.

A rule is one function, ``(module, activations, backprops) -> {parameter: factor}`` (docs/writing-a-rule.md). Imports
``taps`` and below.
"""

from dpfast.rules import (
    attention,
    convolution,
    copies,
    embedding,
    experts,
    functional,
    functorch,
    huggingface,
    linear,
    normalization,
    opacus_layers,
    recurrent,
    refused,
    standardised_convolution,
    windows,
)
from dpfast.rules.linear import compute_linear_grad_sample, compute_linear_norm_sample

__all__ = [
    "attention",
    "compute_linear_grad_sample",
    "compute_linear_norm_sample",
    "convolution",
    "copies",
    "embedding",
    "experts",
    "functional",
    "functorch",
    "huggingface",
    "linear",
    "normalization",
    "opacus_layers",
    "recurrent",
    "refused",
    "standardised_convolution",
    "windows",
]
