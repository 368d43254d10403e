"""What a look catches gradients of beside a layer's first output: other outputs (states, weights of an attention), and
rows that were picked. Where these have their samples the look finds by itself, as they change with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpfast.taps.fingerprints import Prints
from dpfast.taps.inputs import tensors_in
from dpfast.taps.seen import Beside, Key, Run
from dpfast.taps.shared import Shared


def catch_beside(seen: Run, key: Key, prints: Prints, first: Tensor, output: Any, size: int) -> list[Tensor]:
    """The outputs beside the first that gradients are caught of: those with samples in some dimension.

    Args:
        key, prints: of the first. size: how many samples there are.
    """
    found: dict[int, Tensor] = {id(first): first}
    for x in tensors_in(output):
        if id(x) in found or isinstance(x, Shared) or not (x.is_floating_point() and x.requires_grad):
            continue
        own = [d for d, s in enumerate(x.shape) if s == size]
        own = own or [d for d, s in enumerate(x.shape) if s and s % size == 0]
        if not own or x.grad_fn is None:
            continue
        found[id(x)] = x
        orders = [prints.order if x.shape[d] == size else None for d in own]
        _note(seen, key, x, [Prints(d, order, prints.whole) for d, order in zip(own, orders, strict=True)], True)
    return list(found.values())[1:]


def note_rows(seen: Run, key: Key, x: Tensor, whole: bool, *, with_gradients: bool) -> None:
    """The same of a layer's output for picked rows, each of which stands at its place among all."""
    _note(seen, key, x, [Prints(0, None, whole)], with_gradients)


def _note(seen: Run, key: Key, x: Tensor, of: list[Prints], with_gradients: bool) -> None:
    number = sum(beside.of == key for beside in seen.beside)  # of other layers there may be more in other runs
    along: dict[Key | Beside, Prints] = {}
    for prints in of:
        where = Beside(key, number, prints.dim)
        along[where], seen.beside[where] = prints, prints.of(x)
    if with_gradients and x.requires_grad:
        seen.catch(along, x)
