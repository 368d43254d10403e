"""Convolutions of 1, 2 and 3 dimensions and their transposes.

A convolution is a linear layer on patches of its input, one per position of its output, so
``G_n[p, (d, k)] = Σ_t b_nt[p] · image_n[d, t·stride + k·dilation]``, each group of channels by itself. Transposed,
input and output change places: the gradient at the output is the image, the input has the rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpfast.arithmetic import accumulating_dtype, sums
from dpfast.errors import InputError
from dpfast.factors import Factor, PatchProduct, channel_sum, row_sum_in_blocks
from dpfast.taps import Activations, register_rule


@register_rule((nn.Conv1d, nn.Conv2d, nn.Conv3d), fresh=True)
def convolution(
    layer: nn.modules.conv._ConvNd, activations: Activations, backprops: Tensor
) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, D, *spatial), backprops (N, P, *positions)."""
    image = activations[0]
    _check(layer, image)
    if layer.groups > 1 or math.prod(layer.kernel_size) > 1:  # whose gradients want channels in front
        backprops = backprops.contiguous()
    factors, rows_norm = _bias(layer, backprops)
    if layer.weight.requires_grad:
        sides = _padding(layer)
        padding = sides[::2][::-1]
        if layer.padding_mode != "zeros" or sides[::2] != sides[1::2]:
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            image, padding = F.pad(image, sides, mode=mode), [0] * len(padding)
        factor = PatchProduct(image, backprops, padding=padding, rows_norm=rows_norm, **_geometry(layer))
        factors[layer.weight] = factor  # type: ignore[index]  # torch declares a Tensor
    return factors


@register_rule((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), fresh=True)
def transposed_convolution(
    layer: nn.modules.conv._ConvTransposeNd, activations: Activations, backprops: Tensor
) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, D, *spatial), backprops (N, P, *positions)."""
    _check(layer, activations[0])
    factors, _ = _bias(layer, backprops)
    if layer.weight.requires_grad:
        # output_padding adds places that no input reaches; those that dilation leaves over are cut off.
        padding: Any = layer.padding  # its numbers: a transposed one takes no names
        factor = PatchProduct(backprops, activations[0], padding=padding, **_geometry(layer))
        factors[layer.weight] = factor  # type: ignore[index]  # torch declares a Tensor
    return factors


def _geometry(layer: nn.modules.conv._ConvNd) -> dict[str, Any]:
    return {
        "kernel": layer.kernel_size,
        "stride": layer.stride,
        "dilation": layer.dilation,
        "groups": layer.groups,
    }


def _padding(layer: nn.modules.conv._ConvNd) -> list[int]:
    """As F.pad takes it: the last dimension first, both sides."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    numbers: Any = layer.padding
    return [side for p in reversed(numbers) for side in (p, p)]


def _bias(layer: nn.modules.conv._ConvNd, backprops: Tensor) -> tuple[dict[nn.Parameter, Factor], Tensor | None]:
    """The bias's factor, and the norms of the backprops that came with it, (N,)."""
    if layer.bias is None or not layer.bias.requires_grad:
        return {}, None
    rows = backprops.to(accumulating_dtype(backprops)).flatten(2)
    if rows.stride(1) == 1:  # channels last
        norms = sums.row_norm(rows.mT)
        factor = row_sum_in_blocks(rows.mT, norms)
    else:
        rows = rows.contiguous()
        norms = sums.row_norm(rows, once=True)
        factor = channel_sum(rows, norms)
    return {layer.bias: factor}, norms.norm(dim=1)  # type: ignore[dict-item]  # torch declares a Tensor


def _check(layer: nn.modules.conv._ConvNd, inputs: Tensor) -> None:
    if inputs.dim() != len(layer.kernel_size) + 2:
        raise InputError(
            f"its input {tuple(inputs.shape)} has no dimension of samples; give it one of {len(layer.kernel_size) + 2} "
            "dimensions"
        )
