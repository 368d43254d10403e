"""What a look catches gradients of beside a layer's first output by samples: other outputs (states, weights of an
attention), and what it gives of rows that the data has picked."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dpfast.looks.fingerprints import Prints, fingerprints
from dpfast.looks.seen import Beside, CaughtOf, Key, OfRows, Run
from dpfast.taps import Picked, Shared, tensors_in


def catch_beside(
    seen: Run, key: Key, prints: Prints, first: Tensor, output: Any, size: int, among: Picked | None
) -> list[Tensor]:
    """The outputs beside the first that gradients are caught of: those with samples in some dimension.

    Args:
        key, prints: of the first. size: how many samples there are. among: the rows that it runs on, if picked.
    """
    found: dict[int, Tensor] = {id(first): first}
    for x in tensors_in(output):
        if id(x) in found or not _has_gradient(x):
            continue
        own = [d for d, s in enumerate(x.shape) if s == size]
        own = own or [d for d, s in enumerate(x.shape) if s and s % size == 0]
        if not own or x.grad_fn is None:
            continue
        found[id(x)] = x
        number = len(seen.beside)
        orders = [prints.order if x.shape[d] == size else None for d in own]
        along: dict[CaughtOf, Prints] = {}
        for d, order in zip(own, orders, strict=True):
            where = Beside(key, number, d)
            along[where] = Prints(d, order, prints.whole)
            seen.beside[where] = along[where].of(x) if among is None else among.alone(along[where].of(x))
        seen.catch(along, x)
    return list(found.values())[1:]


def catch_picked(seen: Run, key: Key, picked: Picked, inputs: Any, output: Any, *, whole: bool) -> list[Tensor]:
    """What a layer gives of picked rows, of which gradients are caught; nothing where it is not known which they are.

    Which rows run in a layer, and how often it is called, may change with each sample: so each row's gradients are
    added up at its place among all that there are to pick.
    """
    if picked.numbers is None or picked.of is None or picked.packed:
        return []
    took, found = next(iter(tensors_in(inputs)), None), []
    constant = took.shape if took is not None and not took.requires_grad else None
    for x in tensors_in(output):
        numbers = picked.numbers_of(len(x), constant) if _has_gradient(x) and x.dim() and len(x) else None
        if numbers is not None:
            where = OfRows(key, picked.of.shape.numel(), x.numel() // len(x))
            seen.sources.setdefault(where, []).append(picked.of)
            seen.catch({where: AtPlaces(numbers, where.rows, whole)}, x)
            found.append(x)
    return found


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() and x.requires_grad and not isinstance(x, Shared)


class AtPlaces(NamedTuple):
    """Of rows along dimension 0, at their places among so many."""

    numbers: Tensor
    rows: int
    whole: bool

    def of_gradient(self, x: Tensor) -> Tensor:
        """Sums of fingerprints (rows,), or of the rows (rows, K)."""
        found = x.detach().reshape(len(x), -1) if self.whole else fingerprints(x, 0)
        return found.new_zeros(self.rows, *found.shape[1:]).index_add_(0, self.numbers.to(found.device), found)
