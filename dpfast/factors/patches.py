"""An image and rows for each place of a kernel in it, and the patches that it sees there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfast.arithmetic import accumulating_dtype, sums


class Patches:
    """What a convolution's gradients are made of.

    Args:
        image: (N, D, *spatial). Kept, not copied; never written to.
        rows: (N, P, *positions).
        kernel, stride, dilation: one number a spatial dimension.
        padding: zeros around the image, on both sides alike.
        groups: channels of image and rows that go together.
        rows_norm: L2 norms of ``rows`` by sample, (N,) fp64, where they are known.
    """

    def __init__(
        self,
        image: Tensor,
        rows: Tensor,
        *,
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        padding: Sequence[int],
        groups: int,
        rows_norm: Tensor | None = None,
    ):
        self.kernel, self.stride, self.dilation, self.groups = tuple(kernel), tuple(stride), tuple(dilation), groups
        self.image, self.rows, self.padding = image, rows, tuple(padding)
        self._rows_norm = rows_norm
        for size, p, end, s in zip(image.shape[2:], self.padding, self._reached(), self.stride, strict=True):
            if size + 2 * p - end >= s:
                # Room for more positions than there are rows: torch's convolution would want them.
                self.image, self.padding = self._padded(image), (0,) * len(self.kernel)
                break
        self.shape = torch.Size((rows.shape[1], image.shape[1] // groups, *kernel))

    @property
    def num_samples(self) -> int:
        return self.rows.shape[0]

    @property
    def _positions(self) -> int:
        return self.rows.shape[2:].numel()

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(T, D, P) of one group's outer product."""
        return self._positions if self.num_samples else 0, self.shape[1:].numel(), self._rows_a_group

    def _reached(self) -> list[int]:
        """How far the patches reach into the padded image, along each dimension."""
        geometry = zip(self.rows.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        return [(positions - 1) * s + d * (k - 1) + 1 for positions, k, s, d in geometry]

    def _padded(self, image: Tensor) -> Tensor:
        """(..., *spatial) with its zeros around it, without what a stride leaves over."""
        if any(self.padding):
            image = F.pad(image, [p for p in reversed(self.padding) for _ in range(2)])
        for i, end in enumerate(self._reached()):
            if image.shape[2 + i] > end:
                image = image.narrow(2 + i, 0, end)
        return image

    @property
    def _rows_a_group(self) -> int:
        return self.shape[0] // self.groups

    def _cut_out(self, image: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Patches (n·groups, D/groups·kernel, positions) of an image without padding, and rows to match."""
        n, dims = image.shape[0], len(self.kernel)
        if self.shape[2:].numel() > 1:  # else a patch is a pixel
            # (n, D, *positions, *kernel) -> (n, D, *kernel, *positions)
            image = self._windows(image).movedim(tuple(range(2 + dims, 2 + 2 * dims)), tuple(range(2, 2 + dims)))
        else:
            image = self._pixels(image)
        positions = rows.shape[2:].numel()
        patches = image.reshape(n * self.groups, self.shape[1:].numel(), positions)
        return patches, rows.reshape(n * self.groups, self._rows_a_group, positions)

    def _windows(self, image: Tensor) -> Tensor:
        """What the kernel sees of an image without padding, (n, D, *positions, *kernel), a view."""
        for i, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            image = image.unfold(2 + i, d * (k - 1) + 1, s)
            image = image[..., ::d] if d > 1 else image
        return image

    def _pixels(self, image: Tensor) -> Tensor:
        """The same of a kernel of one place, (n, D, *positions)."""
        if self.stride.count(1) == len(self.stride):
            return image
        steps: Any = (..., *(slice(None, None, s) for s in self.stride))
        return image[steps]

    def norms(self) -> tuple[Tensor, Tensor]:
        """Upper bounds of the L2 norms of a sample's patches, all together, and of its rows, (N,)."""
        rows_norm = _norm(self.rows) if self._rows_norm is None else self._rows_norm
        return _norm(self.image) * self.shape[2:].numel() ** 0.5, rows_norm

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.image.nbytes + self.rows.nbytes


def _norm(x: Tensor) -> Tensor:
    """L2 norms by sample for error bounds, (N,) in fp64, along what lies together in memory."""
    x = x.to(accumulating_dtype(x)).flatten(2)
    return torch.linalg.vector_norm(sums.row_norm(x.mT if x.stride(1) == 1 else x), dim=1)
