"""A budget for what a step holds between its norms and its clipped sums: which layers write their gradients.

Counted are gradients and layers' inputs; not the one or two numbers a position that error bounds take.

The plan follows from the shapes of earlier steps alone, never from how many samples there are or how long something
took, so a sample's norm has the same bits in any company.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpfast.arithmetic import accumulating_dtype, cost, ops
from dpfast.errors import InputError
from dpfast.factors import Dense, Factor, OuterProduct, PatchProduct, Ragged, parts_of

_ONE_SIZE = "memory_budget plans samples of one size, not units, nor rows that the data picks; leave it out"

Key = tuple[int, ...]  # place, part, and sizes


@dataclass(frozen=True)
class Planned:
    """What a plan holds a sample, in bytes, and which of the sizes it was made from write their gradients."""

    held: int
    written: tuple[bool, ...]


class MemoryBudget:
    """The plan of one model.

    Args:
        budget: an int: bytes a sample. A float: a multiple of the inputs and output gradients of all layers, those that
            several layers share counted at each.

    Raises:
        InputError: it is not positive.
    """

    def __init__(self, budget: float):
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
            raise InputError(f"memory_budget={budget!r} must be bytes a sample (an int) or a ratio (a float), positive")
        self.budget = budget
        self._written: dict[Key, bool] = {}
        self._seen: dict[Key, cost.Size] = {}
        self._only_uses: set[int] = set()  # places of parameters that have no other

    def begin(self, units: object) -> None:
        """A step begins, of units or of samples (None).

        Raises:
            InputError: it is one of units, which have any number of rows.
        """
        if units is not None:
            raise InputError(_ONE_SIZE)
        self._seen, self._only_uses = {}, set()

    def tell(self, place: int, factor: Factor, only_use: bool) -> None:
        """Says to a factor of the parameter at that place how it is to be kept: as planned, or in the way that holds
        least, where its shape is new. ``only_use``: the step has no other of that parameter."""
        if isinstance(factor, Ragged):
            raise InputError(_ONE_SIZE)
        if only_use:
            self._only_uses.add(place)
        for i, part in enumerate(parts_of(factor)):
            size = size_of(part)
            key: Key = (place, i, size.t, size.gradient, size.inputs)
            while key in self._seen:  # the parameter is used again
                key = (*key, 0)
            self._seen[key] = size
            if isinstance(part, (OuterProduct, PatchProduct)):
                written = self._written.get(key, size.gradient <= size.inputs)
                part.keep_ratio = float("inf") if written else 0.0

    def end(self) -> None:
        """The factors of a step have all been told.

        Raises:
            InputError: they cannot be held within the budget.
        """
        if self._seen.keys() <= self._written.keys() or not any(s.inputs for s in self._seen.values()):
            return
        sizes = list(self._seen.values())
        limit = self.budget if isinstance(self.budget, int) else self.budget * sum(s.inputs for s in sizes)
        steps = list(plans(sizes))
        least = steps[0].held
        if least > limit:
            ratio = math.ceil(1e3 * least / sum(s.inputs for s in sizes)) / 1e3
            one = held_one_by_one((key[0], size, key[0] in self._only_uses) for key, size in self._seen.items())
            raise InputError(
                f"memory_budget={self.budget!r} cannot be met: between norms and clipped sums one backward pass of "
                f"this model holds at least {least} bytes a sample (a ratio of {ratio:.3f}); give that, or take "
                "passes=2 or ConstantPerLayerClipper, which hold one layer at a time, here at most "
                f"{one} bytes a sample"
            )
        taken = [step for step in steps if step.held <= limit][-1]
        for key, written in zip(self._seen, taken.written, strict=True):
            self._written[key] = self._written.get(key, True) and written


def _rows(part: OuterProduct | PatchProduct) -> Tensor:
    return part.backprops if isinstance(part, OuterProduct) else part.rows


def way_unwritten(part: OuterProduct | PatchProduct) -> cost.Way:
    """How its norm is taken where its gradients are not written."""
    if isinstance(part, OuterProduct):
        return ops.norm_way(part.activations, part.backprops)
    return cost.norm_way(*part.matrix_shape, part.rows.device)


def size_of(part: Factor) -> cost.Size:
    """Of one factor, a sample."""
    n = max(1, part.num_samples)
    if isinstance(part, (OuterProduct, PatchProduct)):
        if isinstance(part, OuterProduct):
            (_, t, d), p, groups = part.activations.shape, part.shape[0], 1
            dtype = part.dtype
        else:
            (t, d, p), groups = part.matrix_shape, part.groups
            dtype = accumulating_dtype(part.image, part.rows)
        flops = groups * cost.norm_flops(way_unwritten(part), t, d, p)
        gradient = dtype.itemsize * part.shape.numel()
        return cost.Size(t, flops, gradient, part.nbytes // n, _rows(part).device.type)
    held: Any = part.values if isinstance(part, Dense) else part
    nbytes = getattr(held, "nbytes", part.shape.numel() * n * 4) // n
    return cost.Size(1, 0, nbytes, nbytes, "cpu")


def plans(sizes: list[cost.Size]) -> Iterator[Planned]:
    """From the one that holds least to the fastest: gradients that are smaller than their inputs are written; then
    those whose norms cost most for the bytes that they hold more, as long as writing costs less than the norm."""
    written = [s.t > 1 and s.gradient <= s.inputs for s in sizes]
    held = sum(s.gradient if w else s.inputs for s, w in zip(sizes, written, strict=True))
    yield Planned(held, tuple(written))
    more = [i for i, (s, w) in enumerate(zip(sizes, written, strict=True)) if not w and s.saves > 0]
    for i in sorted(more, key=lambda i: (-sizes[i].saves / (sizes[i].gradient - sizes[i].inputs), i)):
        written[i] = True
        held += sizes[i].gradient - sizes[i].inputs
        yield Planned(held, tuple(written))


def held_one_by_one(uses: Iterable[tuple[Hashable, cost.Size, bool]]) -> int:
    """The most bytes a sample that are held where norms are taken as soon as they can be, with two passes and clipping
    by layer: those of the largest parameter, beside those of the ones that wait for all of their uses.

    Args:
        uses: a parameter, what one of its factors holds, and whether it has no other use.
    """
    alone: dict[Hashable, int] = {}
    waiting = 0
    for parameter, size, only_use in uses:
        if only_use:
            alone[parameter] = alone.get(parameter, 0) + size.inputs
        else:
            waiting += size.inputs
    return waiting + max(alone.values(), default=0)
