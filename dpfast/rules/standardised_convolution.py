"""Convolutions that standardise their weight, by name: nothing of the packages is imported.

Others' are followed operation by operation, with the same factors; these are known, and a step of a BiT has fifty. The
weight is standardised by the class's own calls, so the output has its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpfast.factors import Factor, keeps_gradients
from dpfast.rules.convolution import convolution
from dpfast.taps import Activations, Held, Pieces, pulled_back, register_forward, remaining


@register_forward("transformers.models.bit.modeling_bit.WeightStandardizedConv2d")
def padded_first(layer: Any, piece: Pieces, input: Tensor) -> Tensor:
    """As the class's forward."""
    return standardised_convolution(layer, piece, input if layer.pad is None else layer.pad(input))


@register_forward("timm.layers.std_conv.StdConv2d")
def standardised_convolution(layer: Any, piece: Pieces, image: Tensor) -> Tensor:
    """As the class's forward. Source: Qiao et al., Weight Standardization (2019), eq. 11."""
    weight, bias = layer.weight, layer.bias
    source = weight.detach().requires_grad_(weight.requires_grad)
    with remaining():
        rows = source.reshape(1, layer.out_channels, -1)
        value = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=layer.eps).reshape_as(source)
    held = Held()

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, value.detach(), bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    geometry = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups")}

    def of_its_weight(parameters: Any, activations: Activations, backprops: Tensor) -> Mapping[Any, Factor]:
        own, its_bias = parameters
        of: Any = SimpleNamespace(weight=source, bias=its_bias, padding_mode="zeros", **geometry)
        found: Any = convolution(of, activations, backprops)
        factor = found.pop(source, None)
        if factor is not None:
            factor.output = held.take(activations[0])
            (found[own],) = pulled_back(factor, value, [source])
        return found

    output = piece(of_its_weight, convolve, [weight, bias], image)
    if bias is None and source.requires_grad and not keeps_gradients(image, output, source.shape, layer.groups):
        held.hold(output, image)
    return output
