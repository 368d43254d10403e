"""Convolutions of 1, 2 and 3 dimensions and their transposes.

A convolution is a linear layer on patches of its input, one per position of its output, so
``G_n[p, (d, k)] = Σ_t b_nt[p] · image_n[d, t·stride + k·dilation]``, each group of channels by itself. Transposed,
input and output change places: the gradient at the output is the image, the input has the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast import cost
from dpfast.bounds import SquaredNorm
from dpfast.errors import InputError
from dpfast.factors import Dense, Factor, OuterProduct, row_sum
from dpfast.reference import WORKSPACE_BYTES, compute_dtype
from dpfast.registry import Activations, register_rule


class PatchProduct:
    """``G_n = Σ_t rows_nt patch_nt``, of shape (P, D / groups, *kernel); patches are cut out only when they are needed.

    Args:
        image: (N, D, *spatial), padded. Kept, not copied; never written to.
        rows: (N, P, *positions).
        kernel, stride, dilation: one number a spatial dimension.
        groups: channels of image and rows that go together.
    """

    def __init__(
        self,
        image: Tensor,
        rows: Tensor,
        *,
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ):
        self.kernel, self.stride, self.dilation, self.groups = tuple(kernel), tuple(stride), tuple(dilation), groups
        self.rows = rows
        for i, (positions, k, s, d) in enumerate(zip(rows.shape[2:], kernel, stride, dilation, strict=True)):
            image = image.narrow(2 + i, 0, (positions - 1) * s + d * (k - 1) + 1)  # what a stride leaves over
        self.image = image
        self.shape = torch.Size((rows.shape[1], image.shape[1] // groups, *kernel))

    @property
    def num_samples(self) -> int:
        return self.rows.shape[0]

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(T, D, P) of one group's outer product."""
        return self.rows[0:1, 0].numel() if self.num_samples else 0, self.shape[1:].numel(), self._rows_a_group

    @property
    def _rows_a_group(self) -> int:
        return self.shape[0] // self.groups

    def _outer_product(self, first: int, last: int) -> OuterProduct:
        """Samples first to last, groups folded into samples."""
        image, rows = self.image[first:last], self.rows[first:last]
        for i, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            image = image.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
        n, dims = image.shape[0], len(self.kernel)
        # (n, D, *positions, *kernel) -> (n·groups, D/groups·kernel, positions)
        image = image.movedim(tuple(range(2 + dims, 2 + 2 * dims)), tuple(range(2, 2 + dims)))
        patches = image.reshape(n * self.groups, self.shape[1:].numel(), self.rows.shape[2:].numel())
        rows = rows.reshape(n * self.groups, self._rows_a_group, self.rows.shape[2:].numel())
        return OuterProduct(patches.mT, rows.mT)

    def _outer_products(self) -> list[tuple[int, int]]:
        """Ranges of samples whose patches fit the workspace."""
        sample = self.groups * self.shape[1:].numel() * self.rows.shape[2:].numel() * self.image.element_size()
        step = max(1, WORKSPACE_BYTES // max(1, sample))
        return [(i, min(i + step, self.num_samples)) for i in range(0, self.num_samples, step)]

    def materialize(self, scale: float = 1.0) -> Tensor:
        parts = [self._outer_product(i, j).materialize(scale) for i, j in self._outer_products()]
        if not parts:
            return self.rows.new_zeros(0, *self.shape, dtype=compute_dtype(self.image, self.rows))
        return torch.cat(parts).view(self.num_samples, *self.shape)

    def sq_norm(self) -> SquaredNorm:
        norms = [self._outer_product(i, j).sq_norm() for i, j in self._outer_products()]
        if not norms:
            return SquaredNorm(*(self.rows.new_zeros(0, dtype=torch.float64) for _ in range(2)))
        value, upper = (torch.cat(x).view(-1, self.groups).sum(1) for x in zip(*norms, strict=True))
        return SquaredNorm(value, upper * (1.0 + 2.0**-40))

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        dtype = compute_dtype(self.image, self.rows)
        c = coefficients.to(dtype).view(-1, *[1] * (self.rows.dim() - 1))
        rows = (self.rows.to(dtype) * c).masked_fill(c == 0, 0.0)
        image = self.image.to(dtype).masked_fill(c == 0, 0.0)
        if self.num_samples == 0:
            return rows.new_zeros(self.shape)
        none = [0] * len(self.kernel)
        _, weight, _ = torch.ops.aten.convolution_backward(
            *(rows, image, rows.new_empty(self.shape), None),
            *(self.stride, none, self.dilation, False, none, self.groups),
            [False, True, False],
        )
        return weight

    def materialized(self) -> Dense:
        parts = [self._outer_product(i, j).materialized() for i, j in self._outer_products()]
        if not parts:
            return Dense(self.materialize())
        values = torch.cat([p.values for p in parts]).view(self.num_samples, *self.shape)
        errors = torch.cat([p.error for p in parts]).view(-1, self.groups).square().sum(1).sqrt()
        return Dense(values, error=errors * (1.0 + 2.0**-40))

    def kept(self) -> Factor:
        return self.materialized() if cost.keeps(*self.matrix_shape) else self


@register_rule((nn.Conv1d, nn.Conv2d, nn.Conv3d), fresh=True)
def convolution(layer: nn.Conv2d, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, D, *spatial), backprops (N, P, *positions)."""
    image = activations[0]
    _check(layer, image)
    factors = _bias(layer, backprops)
    if layer.weight.requires_grad:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = F.pad(image, _padding(layer), mode=mode)
        factors[layer.weight] = PatchProduct(padded, backprops, **_geometry(layer))
    return factors


@register_rule((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), fresh=True)
def transposed_convolution(
    layer: nn.ConvTranspose2d, activations: Activations, backprops: Tensor
) -> dict[nn.Parameter, Factor]:
    """activations[0] (N, D, *spatial), backprops (N, P, *positions)."""
    _check(layer, activations[0])
    factors = _bias(layer, backprops)
    if layer.weight.requires_grad:
        # output_padding adds places that no input reaches; those that dilation leaves over are cut off.
        padded = F.pad(backprops, [p for pair in reversed(layer.padding) for p in (pair, pair)])
        factors[layer.weight] = PatchProduct(padded, activations[0], **_geometry(layer))
    return factors


def _geometry(layer: nn.Conv2d) -> dict[str, Sequence[int] | int]:
    return {
        "kernel": layer.kernel_size,
        "stride": layer.stride,
        "dilation": layer.dilation,
        "groups": layer.groups,
    }


def _padding(layer: nn.Conv2d) -> list[int]:
    """As F.pad takes it: the last dimension first, both sides."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return [side for p in reversed(layer.padding) for side in (p, p)]


def _bias(layer: nn.Conv2d, backprops: Tensor) -> dict[nn.Parameter, Factor]:
    if layer.bias is None or not layer.bias.requires_grad:
        return {}
    return {layer.bias: row_sum(backprops.flatten(2).mT)}


def _check(layer: nn.Conv2d, inputs: Tensor) -> None:
    if inputs.dim() != len(layer.kernel_size) + 2:
        raise InputError(
            f"its input {tuple(inputs.shape)} has no dimension of samples; give it one of {len(layer.kernel_size) + 2} "
            "dimensions"
        )
