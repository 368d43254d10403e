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

from dpfast.arithmetic import SquaredNorm, Unfinished, norm_terms, reference, sum_error_columns, sum_errors
from dpfast.factors.alike import SMALL, Alike
from dpfast.factors.dense import Dense

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
        order = sorted(range(len(alikes)), key=lambda i: norms[i].kind or (0, 0))
        self._order = order
        stands = [place for i in order for place in places[i]]
        self._index = torch.tensor(sorted(range(len(stands)), key=stands.__getitem__))
        layers = [alikes[i].layers for i in order]
        self._relative, self._least, self._slop = norm_terms([norms[i] for i in order], layers)
        self._last_slop = 1.0 + (len(stands) + 4) * 2.0**-53
        self._errors: list[tuple[list[int], int, Any]] = []  # which, how many norms each, columns
        for kind in dict.fromkeys(norms[i].kind for i in order):
            which = [i for i in order if norms[i].kind == kind]
            if kind is None:
                self._errors += [([i], 0, None) for i in which]
            else:
                columns = sum_error_columns([norms[i].error for i in which], [alikes[i].layers for i in which])
                self._errors.append((which, kind[0], columns))
        self._small: list[tuple[int, int, torch.Size]] = []  # which, of how many layers, each's shape
        self._large: list[tuple[int, int, torch.Size]] = []
        self._others: list[int] = []
        for i, alike in enumerate(alikes):
            factor = alike.factor
            if not isinstance(factor, Dense):
                self._others.append(i)
            elif factor.shape.numel() <= SMALL:
                self._small.append((i, alike.layers, factor.shape))
            elif alike.layers > 1:
                self._large.append((i, alike.layers, torch.Size((alike.layers, *factor.shape))))
            else:
                self._others.append(i)
        self._sizes = [shape.numel() for _, layers, shape in self._small for _ in range(layers)]
        # Of whom each sum is, in the order of :meth:`sums`.
        self.of = [i for some in (self._small, self._large) for i, layers, _ in some for _ in range(layers)]
        self.of += [i for i in self._others for _ in range(alikes[i].layers)]

    @classmethod
    def learned(cls, alikes: Sequence[Alike], n: int, places: Sequence[Sequence[int]]) -> Remembered | None:
        """None where the numbers are not all on a CPU, in fp32 and few."""
        entries: dict[Any, int] = {}
        for alike in alikes:
            norm, factor = alike.norm, alike.factor
            if not isinstance(norm, Unfinished) or norm.norm.device.type != "cpu" or norm.dtype is not torch.float32:
                return None
            if isinstance(factor, Dense) and factor.values.dtype is not torch.float32:
                return None
            if norm.kind is not None:
                found = norm.error.norms[0]  # type: ignore[union-attr]  # where there is a kind
                if any(x.dtype is not torch.float32 for x in norm.error.norms):  # type: ignore[union-attr]
                    return None
                entries[norm.kind] = entries.get(norm.kind, 0) + found.numel()
        return cls(alikes, n, places) if n and alikes and max(entries.values(), default=0) <= _MOST_ENTRIES else None

    def total_sq_norm(self, alikes: Sequence[Alike]) -> SquaredNorm:
        """``stacked.total_sq_norm`` of them."""
        n = self._n
        norms: list[Any] = [alike.norm for alike in alikes]
        value = torch.cat([norms[i].norm for i in self._order]).view(-1, n).square_()
        errors = []
        for which, number, columns in self._errors:
            if number == 0:
                error = norms[which[0]].error
                errors.append((torch.zeros_like(norms[which[0]].norm) if error is None else error).view(-1, n))
                continue
            errors.append(sum_errors([norms[i].error for i in which], n, columns))
        upper = torch.addcmul(self._least, value, self._relative).sqrt_()
        upper = upper.add_(torch.cat(errors) if len(errors) > 1 else errors[0]).square_().mul_(self._slop)
        value, upper = (x.index_select(0, self._index).cumsum(0)[-1] for x in (value, upper))
        return SquaredNorm(value, upper.mul_(self._last_slop))

    def sums(self, alikes: Sequence[Alike], coefficients: Tensor) -> list[Tensor]:
        """``Σ_n c_n G_n`` of each layer, c (n,) fp32 and none of them 0: in the order of :attr:`of`."""
        n, found = self._n, []
        if self._small:
            rows: list[Tensor] = []
            for i, layers, _ in self._small:
                values = alikes[i].factor.values  # type: ignore[union-attr]  # small ones are dense
                rows += values.reshape(layers, n, -1).unbind() if layers > 1 else [values.reshape(n, -1)]
            total = reference.weighted_rows([torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]], coefficients)
            found = list(total.split(self._sizes)) if len(rows) > 1 else [total]
            first = 0
            for _, layers, shape in self._small:
                if len(shape) > 1:
                    found[first : first + layers] = [x.view(shape) for x in found[first : first + layers]]
                first += layers
        for i, layers, shape in self._large:
            values = alikes[i].factor.values.reshape(layers, n, -1)  # type: ignore[union-attr]  # as above
            found += torch.bmm(coefficients.expand(layers, 1, n), values).view(shape).unbind()
        for i in self._others:
            found += alikes[i].weighted_sums(coefficients)
        return found
