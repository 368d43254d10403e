"""The end of a step like one before: which numbers stand where is known, and only they are worked out.

Norms, bounds and sums of layers alike follow from what has been caught by the same calls in each step; what differs is
the numbers. So the order of things is kept from a step of the same layers and shapes. The calls are those of
``stacked`` and ``alike``, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, bounds, norm_terms, reference, sum_error_columns, sum_errors
from dpfast.factors.alike import Alike, Numbers, sums_of_all_inputs

_MOST_ENTRIES = 2**20
"""Row norms that are worked on at a time, as in ``stacked_norms``."""


class Remembered:
    """Of factors with the shapes, dtypes and numbers of layers of ``alikes``, n samples each, all on a CPU.

    Args:
        places: of each one's layers; see ``stacked.total_sq_norm``.
    """

    def __init__(self, alikes: Sequence[Alike], n: int, places: Sequence[Sequence[int]]):
        norms: list[Any] = [alike.norm for alike in alikes]
        self._n = n
        self._order = order = sorted(range(len(alikes)), key=lambda i: norms[i].kind or (0, 0))
        stands = [place for i in order for place in places[i]]
        self._index = torch.tensor(sorted(range(len(stands)), key=stands.__getitem__))
        layers = [alikes[i].layers for i in order]
        self._relative: Any
        self._least: Any
        self._relative, self._least, self._slop = norm_terms([norms[i] for i in order], layers)
        self._last_slop = bounds.fp64_slop(len(stands))
        self._errors: list[tuple[list[int], int, Any]] = []  # which, how many norms each, columns
        for kind in dict.fromkeys(norms[i].kind for i in order):
            which = [i for i in order if norms[i].kind == kind]
            if kind is None:
                self._errors += [([i], 0, torch.zeros(alikes[i].layers, n, dtype=torch.float64)) for i in which]
            else:
                columns = sum_error_columns([norms[i].error for i in which], [alikes[i].layers for i in which])
                self._errors.append((which, kind[0], columns))
        self._sums = [_shapes(alike, n) for alike in alikes]
        # Of whom each sum is, in the order of :meth:`sums`.
        self.of = [i for i, alike in enumerate(alikes) for _ in range(alike.layers)]

    @classmethod
    def learned(cls, alikes: Sequence[Alike], n: int, places: Sequence[Sequence[int]]) -> Remembered | None:
        """None where the numbers are not all on a CPU, in fp32 and few."""
        entries: dict[Any, int] = {}
        for alike in alikes:
            norm, numbers = alike.norm, alike.numbers()
            if numbers is None or numbers.norm.device.type != "cpu" or norm.dtype is not torch.float32:  # type: ignore[union-attr]  # unfinished
                return None
            if isinstance(numbers.of, tuple):
                if any(x.dtype is not torch.float32 for x in numbers.of):
                    return None
                kind = norm.kind  # type: ignore[union-attr]  # as above
                entries[kind] = entries.get(kind, 0) + numbers.of[0].numel()
        return cls(alikes, n, places) if n and alikes and max(entries.values(), default=0) <= _MOST_ENTRIES else None

    def total_sq_norm(self, numbers: Sequence[Numbers]) -> SquaredNorm:
        """``stacked.total_sq_norm`` of them."""
        n = self._n
        value = torch.cat([numbers[i][0] for i in self._order]).view(-1, n).square_()
        errors = []
        for which, number, columns in self._errors:
            if number:
                errors.append(sum_errors([numbers[i][1] for i in which], n, columns))  # type: ignore[misc]  # norms
                continue
            error: Any = numbers[which[0]][1]
            errors.append(columns if error is None else error.view(-1, n))
        upper = torch.addcmul(self._least, value, self._relative).sqrt_()
        upper = upper.add_(torch.cat(errors) if len(errors) > 1 else errors[0]).square_().mul_(self._slop)
        value, upper = (x.index_select(0, self._index).cumsum(0)[-1] for x in (value, upper))
        return SquaredNorm(value, upper.mul_(self._last_slop))

    def sums(self, numbers: Sequence[Numbers], coefficients: Tensor) -> list[Tensor]:
        """``Σ_n c_n G_n`` of each layer, c (n,) fp32 and none of them 0: in the order of :attr:`of`."""
        found: list[Tensor] = []
        rows = coefficients.view(1, 1, -1)
        for (_, _, factor), (layers, slices, values, sums) in zip(numbers, self._sums, strict=True):
            if not isinstance(factor, Tensor):
                found += sums_of_all_inputs(factor, layers, coefficients)
            elif layers == 1:
                found.append(reference.sum_of_rows(factor.view(values), coefficients, slices).view(sums))
            else:
                found += torch.bmm(rows.expand(layers, 1, -1), factor.view(values)).view(sums).unbind()
        return found


def _shapes(alike: Alike, n: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """How many layers, in how many slices those of one are summed, and the shapes of gradients as rows and of sums."""
    layers, shape = alike.layers, alike.factor.shape
    if layers == 1:
        return 1, reference.slices_of(shape.numel()), (n, shape.numel()), tuple(shape)
    return layers, 1, (layers, n, shape.numel()), (layers, *shape)
