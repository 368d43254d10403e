"""Gradients of convolutions: outer products of rows with patches of an image, which are cut out only when needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import (
    AnyNorm,
    SquaredNorm,
    accumulating_dtype,
    buffers,
    cost,
    exact_convolutions,
    finished,
    is_traced,
    operator,
    products,
    reduced_convolutions,
    reduced_products,
    reference,
    sums,
    towards_zero,
    unfinished_gram_of_patches,
    unfinished_norm,
)
from dpfast.factors.dense import Dense, Factor, InBlocks
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.patches import Patches
from dpfast.factors.runs import take
from dpfast.factors.ways import SHORT_CHAIN, TOGETHER, Ways, ways

FEW = 16
"""Positions up to which clipped sums are products of patches."""

_convolution_backward = operator(torch.ops.aten.convolution_backward.default)


class PatchProduct(Patches):
    """``G_n = Σ_t rows_nt patch_nt``, of shape (P, D / groups, *kernel); patches are cut out only when they are needed.

    Attributes:
        output: of the convolution whose weight's gradients these are, without a bias, where it is at hand.
    """

    output: Tensor | None = None
    keep_ratio: float | None = None  # see ``cost.keeps``

    def taken(self, samples: Tensor | slice) -> PatchProduct:
        """Those samples alone."""
        rows_norm = None if self._rows_norm is None else take(self._rows_norm, samples)
        return self._of(take(self.image, samples), take(self.rows, samples), rows_norm)

    def _of(self, image: Tensor, rows: Tensor, rows_norm: Tensor | None = None) -> PatchProduct:
        """Of the same layer, as many pixels and positions: its padding is known."""
        found = PatchProduct.__new__(PatchProduct)
        found.kernel, found.stride, found.dilation, found.groups = self.kernel, self.stride, self.dilation, self.groups
        found.image, found.rows, found.padding, found.shape = image, rows, self.padding, self.shape
        found._rows_norm = rows_norm
        return found

    def _outer_product(self, first: int, last: int) -> OuterProduct:
        """Samples first to last, groups folded into samples."""
        whole = first == 0 and last >= self.num_samples
        image, rows = (x if whole else x[first:last] for x in (self.image, self.rows))
        patches, rows = self._cut_out(self._padded(image), rows)
        return OuterProduct(patches.mT, rows.mT)

    def _outer_products(self) -> list[tuple[int, int]]:
        """Ranges of samples whose patches fit the workspace."""
        sample = self.groups * self.shape[1:].numel() * self._ways.positions * self.image.element_size()
        step = max(1, reference.WORKSPACE_BYTES // max(1, sample))
        return [(i, min(i + step, self.num_samples)) for i in range(0, self.num_samples, step)]

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = self.materialized().values
        return values.mul_(scale) if scale != 1.0 else values

    def sq_norm(self) -> SquaredNorm:
        if self.num_samples == 0:
            return SquaredNorm(*(self.rows.new_zeros(0, dtype=torch.float64) for _ in range(2)))
        found = self.unfinished()
        if found is not None:
            return finished(found)
        if self._by_pixels:
            parts = (self._padded(self.image), self.rows)
            image, rows = (x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:]) for x in parts)
            norms = [finished(unfinished_gram_of_patches(image, rows, self.kernel, self.dilation))]
        else:
            norms = [self._outer_product(i, j).sq_norm() for i, j in self._outer_products()]
        value, upper = (torch.cat(x).view(-1, self.groups).sum(1) for x in zip(*norms, strict=True))
        return SquaredNorm(value, upper * (1.0 + 2.0**-40))

    def unfinished(self) -> AnyNorm | None:
        """What the norm follows from; None where that is not taken at once, of all samples and groups."""
        if self._by_convolution and self._goes_direct:
            return unfinished_norm(self._convolved(), self._error())
        if self.groups > 1:
            return None
        if self._by_pixels:
            return unfinished_gram_of_patches(self._padded(self.image), self.rows, self.kernel, self.dilation)
        ranges = self._outer_products()
        return self._outer_product(*ranges[0]).unfinished() if len(ranges) == 1 else None

    @property
    def _goes_direct(self) -> bool:
        """Whether the norm comes from the gradient itself where torch's convolution gives that. A FLOP of Gram matrices
        costs 2 to 3 of the convolution's there, cut out patches included (T = 64, D = 576, P = 64, AMD EPYC)."""
        t, d, p = self.matrix_shape
        direct = cost.norm_flops("direct", t, d, p)
        if self._by_pixels and cost.gram_slack(t, d, p) <= cost.MAX_GRAM_SLACK:
            return direct < 2 * (self._pixel_flops + cost.norm_flops("gram", t, 0, p))
        return cost.norm_way(t, d, p) == "direct" or direct < 2 * cost.norm_flops("gram", t, d, p)

    @property
    def _by_pixels(self) -> bool:
        """Whether the Gram way goes by the Gram matrices of the pixels: on a CPU, where that is less."""
        t, d, _ = self.matrix_shape
        ones = t > 1 and self.shape[2:].numel() > 1 and all(s == 1 for s in self.stride)
        return ones and self.rows.device.type == "cpu" and self._pixel_flops < cost.norm_flops("gram", t, d, 0)

    @property
    def _pixel_flops(self) -> int:
        sizes = (size + 2 * p for size, p in zip(self.image.shape[2:], self.padding, strict=True))
        return 2 * math.prod(sizes) ** 2 * self.shape[1]

    @property
    def _by_convolution(self) -> bool:
        """Whether samples' gradients come from torch's convolution: on a CPU, where it is twice as fast as products of
        patches, unless a global switch lets it work in less than fp32."""
        return self.rows.device.type == "cpu" and self.rows.numel() > 0 and not reduced_convolutions()

    def _convolved(self) -> Iterator[Tensor]:
        """The gradients (n, *shape) of so many samples, until there are no more."""
        dtype, of, n_all = accumulating_dtype(self.image, self.rows), self._ways, self.rows.shape[0]
        if self._one_by_one:
            patches, rows = self._cut_out(self._padded(self.image), self.rows)
            yield from (products.onednn(*of).view(1, *self.shape) for of in zip(rows, patches, strict=True))
            return
        parts = [(self.image, self.rows)]
        if n_all > of.together:
            parts = [*zip(self.image.split(of.together), self.rows.split(of.together), strict=True)]
        for image, rows in parts:
            n, image, rows = rows.shape[0], image.to(dtype), rows.to(dtype)
            missing = 0 if of.together == 1 else next(size for size in (2, 4, 8, TOGETHER) if n <= size) - n
            if missing:
                image, rows = (torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in (image, rows))
            if of.blocks == 1:
                total: Any = self._added_up(image, rows, self.padding)
            else:
                span = self.dilation[0] * (self.kernel[0] - 1) + 1
                image, total, none = self._padded(image), None, [0] * len(self.kernel)
                for start in range(0, rows.shape[2], of.block):
                    length = min(of.block, rows.shape[2] - start)
                    part = image.narrow(2, start * self.stride[0], (length - 1) * self.stride[0] + span)
                    gradients = self._added_up(part, rows.narrow(2, start, length), none)
                    total = gradients if total is None else total.add_(gradients)
            yield total[:n].clone() if missing else total

    @property
    def _ways(self) -> Ways:
        found: Ways | None = self.__dict__.get("_known")
        if found is None:
            rows, dtype = self.rows, accumulating_dtype(self.image, self.rows)
            on_cpu, exact = rows.device.type == "cpu", reduced_products() == 0.0
            found = self._known = ways(self.shape, rows.shape[2:], self.groups, dtype, on_cpu, exact)
        return found

    @property
    def _one_by_one(self) -> bool:
        """Whether gradients are products of pixels that need not be copied together."""
        of = self._ways
        whole = of.is_pointwise and of.blocks == 1 and self.image.dtype is self.rows.dtype
        return whole and products.by_onednn(self.shape[0], of.positions, self.shape[1], self.rows)

    @property
    def _sum_is_product(self) -> bool:
        """Whether a product of patches is the faster way to a sum on a CPU (512×512×3×3: at 4×4 positions it takes half
        the time of torch's convolution, at 8×8 1.3 times as long; of pixels by oneDNN 0.4 to 1.0; AMD EPYC)."""
        if self.groups > 1 or self.rows.device.type != "cpu" or reduced_products() != 0.0:
            return False
        of_pixels = self._ways.is_pointwise and all(s == 1 for s in self.stride) and not is_traced()
        sizes = self.shape[0], self.num_samples * self._ways.positions, self.shape[1]
        if of_pixels and products.by_onednn(*sizes, self.image):
            return True
        return self._ways.positions <= FEW and self.shape[:2].numel() >= 2**14

    def _error(self) -> Tensor:
        """How far :meth:`_convolved` may be from the exact gradients, in L2 norm, (N,): ``Σ_t |b_tp||a_td|`` is at most
        the product of two columns' norms, and a pixel is in at most as many patches as the kernel has places."""
        of = self._ways
        return of.relative * self._norm_products() + of.least

    def _norm_products(self) -> Tensor:
        """An upper bound of the L2 norm of ``Σ_t |b_tp||a_td|``, (N,): of groups, each has its own."""
        if self.groups == 1:
            patches_norm, rows_norm = self.norms()
            return patches_norm * rows_norm
        by_channel = (sums.row_norm(x.to(accumulating_dtype(x)).flatten(2), once=True) for x in (self.image, self.rows))
        of_image, of_rows = (x.unflatten(1, (self.groups, -1)).norm(dim=2) for x in by_channel)
        return (of_image * of_rows).norm(dim=1) * self.shape[2:].numel() ** 0.5

    def _added_up(self, image: Tensor, rows: Tensor, padding: Sequence[int]) -> Tensor:
        """Gradients (n, *shape) of n samples: as the weight gradient of one sample with n times the groups, or as
        products of pixels or of small patches; of depthwise kernels as a convolution of the images with the rows."""
        n, of = rows.shape[0], self._ways
        if of.is_pointwise:
            patches, rows = self._cut_out(self._padded(image) if any(padding) else image, rows)
            return products.batched(rows, patches.mT).view(n, *self.shape)
        if of.is_narrow:
            patches, rows = self._cut_out(self._padded(image) if any(padding) else image, rows)
            total: Tensor | None = None
            for some, of_some in zip(patches.split(SHORT_CHAIN, 2), rows.split(SHORT_CHAIN, 2), strict=True):
                total = products.batched(some, of_some.mT, add_to=total)
            assert total is not None
            return total.mT.reshape(n, *self.shape)
        if of.is_depthwise:
            return self._with_rows_as_kernels(image, rows, padding)
        rows = rows.reshape(1, -1, *rows.shape[2:])
        weight = rows.new_empty(rows.shape[1], *self.shape[1:])  # of which nothing but the shape is used
        return self._weight_gradient(
            image.reshape(1, -1, *image.shape[2:]), rows, weight, padding, n * self.groups
        ).view(n, *self.shape)

    def _with_rows_as_kernels(self, image: Tensor, rows: Tensor, padding: Sequence[int]) -> Tensor:
        """Of depthwise kernels: each channel of each image convolved with its rows, stride and dilation exchanged. For
        this oneDNN has a fast routine, for the weight gradient only where three places are in a row (7×7: 5 to 25 times
        slower; AMD EPYC, as it is and with AVX2 alone)."""
        image, kernels = image.reshape(1, -1, *image.shape[2:]), rows.reshape(-1, 1, *rows.shape[2:])
        geometry = (self.dilation, padding, self.stride, False, [0] * len(self.kernel))
        found = torch.convolution(image, kernels, None, *geometry, image.shape[1])
        for i, places in enumerate(self.kernel):  # a stride may leave over room for more
            found = found.narrow(2 + i, 0, places)
        return found.reshape(-1, *self.shape)

    def _weight_gradient(
        self, image: Tensor, rows: Tensor, weight: Tensor, padding: Sequence[int], groups: int
    ) -> Tensor:
        if image.is_contiguous():  # one pixel has strides that torch takes for channels last, and fails over in fp64
            image = image.flatten().view(image.shape)
        _, gradient, _ = _convolution_backward(
            *(rows, image, weight, None, self.stride, padding, self.dilation, False, [0] * len(self.kernel), groups),
            [False, True, False],
        )
        return gradient

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        dtype = accumulating_dtype(self.image, self.rows)
        if self.num_samples == 0:
            return self.rows.new_zeros(self.shape, dtype=dtype)
        weights = towards_zero(coefficients, dtype)
        c = weights.view(-1, *[1] * (self.rows.dim() - 1))
        image, rows = self.image.to(dtype), self.rows.to(dtype)
        if reference.drops_samples(weights):
            image, rows = (x.masked_fill(c == 0, 0.0) for x in (image, rows))
        image, rows = (image * c, rows) if image.numel() < rows.numel() else (image, rows * c)
        if self._sum_is_product:
            patches, rows = self._cut_out(self._padded(image), rows)
            rows, patches = (x.transpose(0, 1).flatten(1) for x in (rows, patches))
            return products.of_rows(rows, patches).view(self.shape)
        with exact_convolutions():
            if self._ways.is_depthwise:
                return self._with_rows_as_kernels(image, rows, self.padding).sum(0)
            return self._weight_gradient(image, rows, rows.new_empty(self.shape), self.padding, self.groups)

    def materialized(self) -> Dense:
        dtype = accumulating_dtype(self.image, self.rows)
        if self._by_convolution:
            values = buffers.empty((self.num_samples, *self.shape), dtype, self.rows.device)
            for block, gradients in zip(
                values.split(1 if self._one_by_one else self._ways.together), self._convolved(), strict=True
            ):
                block.copy_(gradients)
            return Dense(values, error=self._error())
        parts = [self._outer_product(i, j).materialized() for i, j in self._outer_products()]
        if not parts:
            return Dense(self.rows.new_zeros(0, *self.shape, dtype=dtype))
        values = torch.cat([p.values for p in parts]).view(self.num_samples, *self.shape)
        all_errors: list[Any] = [p.error for p in parts]  # products have one
        errors = torch.cat(all_errors).view(-1, self.groups).square().sum(1).sqrt()
        return Dense(values, error=errors * (1.0 + 2.0**-40))

    def kept(self) -> Factor:
        return self.written() if self.keeps else self

    def written(self) -> Factor:
        """The gradients, as :meth:`kept` keeps them."""
        return InBlocks(*self.in_blocks()) if self._by_convolution else self.materialized()

    def in_blocks(self) -> tuple[Iterable[Tensor], Tensor]:
        """The gradients (n, *shape) of so many samples, until there are no more, and how far they may be off, (N,)."""
        if self._by_convolution:
            return self._convolved(), self._error()
        dense: Any = self.materialized()  # has an error: of products
        return [dense.values], dense.error

    def with_scaled_rows(self, scales: Tensor) -> PatchProduct:
        """The same with each row of the gradients multiplied by a number of its own, (P,)."""
        rows = self.rows.to(accumulating_dtype(self.image, self.rows)) * scales.view(-1, *[1] * len(self.kernel))
        return self._of(self.image, rows)

    def row_sums(self) -> Tensor:
        """The sum of the entries of each row of the gradients, (N, P); no gradient is written."""
        dtype, dims = accumulating_dtype(self.image, self.rows), len(self.kernel)
        image, rows = (x.to(dtype).unflatten(1, (self.groups, -1)) for x in (self.image, self.rows))
        padded = self._padded(image.sum(2))
        one = self.shape[2:].numel() == 1  # then a patch is a pixel
        patches = self._pixels(padded) if one else self._windows(padded).flatten(2 + dims).sum(-1)
        return (rows * patches.unsqueeze(2)).flatten(3).sum(-1).flatten(1).double()

    def row_products(self, vectors: Tensor) -> Tensor:
        """The product of each row of the gradients with a row of ``vectors`` (P, D), (N, P); no gradient is written."""
        found = []
        for i, j in self._outer_products():
            image, rows = (x[i:j].to(vectors.dtype) for x in (self.image, self.rows))
            patches, rows = self._cut_out(self._padded(image), rows)
            by_group = vectors.view(1, self.groups, self._rows_a_group, -1).expand(j - i, -1, -1, -1).flatten(0, 1)
            found.append((products.batched(by_group, patches) * rows).sum(-1).view(j - i, -1).double())
        return torch.cat(found)

    @property
    def keeps(self) -> bool:
        """Whether :meth:`kept` writes the gradients."""
        return keeps_gradients(self.image, self.rows, self.shape, self.groups, self.keep_ratio)


def keeps_gradients(image: Tensor, rows: Tensor, shape: torch.Size, groups: int, ratio: float | None = None) -> bool:
    """Whether gradients of that shape are better written than kept as image and rows, or tensors such as these.
    Patches count as inputs: a norm would cut them out."""
    t = rows.shape[2:].numel() if rows.shape[0] else 0
    gradient = shape.numel() * accumulating_dtype(image, rows).itemsize
    patches = t * (groups * shape[1:].numel() * image.element_size() + shape[0] * rows.element_size())
    return cost.keeps(t, gradient, patches, ratio)
