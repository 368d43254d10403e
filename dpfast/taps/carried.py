"""Whether what a forward pass keeps of its samples changes what the next one gives.

A codebook that follows the batches, a queue of negatives, a running mean: with these a sample moves the sums of later
steps, in which it is not, and no clipping bounds by how much.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps.gathered import following_model
from dpfast.taps.inputs import results_in
from dpfast.taps.layout import Place
from dpfast.taps.tap import Tap, TappedForward
from dpfast.taps.witness import Key, Run, Witness, copied

_DEPTH = 4  # of objects in objects
_FUNCTIONS = (types.ModuleType, types.FunctionType, types.MethodType, TappedForward)
_HOLD_NOTHING = (Tap, type, str, bytes, *_FUNCTIONS)


def carried(
    model: nn.Module,
    taps: Sequence[Tap],
    structure: Any,
    leaves: Sequence[Any],
    exchanged: Sequence[Any],
    places: dict[Key, Place],
    size: int,
    stand_ins: dict[int, Any],
    again: Callable[[], None],
) -> list[str]:
    """The names of buffers and attributes that differ with one sample of the pass before, where the next pass on the
    same samples does too; none where it does not, or where nothing is kept.

    Args:
        leaves: the inputs, of ``size`` samples. exchanged: with one exchanged. Others: as ``witness.run_on``'s.
    """

    def two_passes(first: Sequence[Any]) -> tuple[dict[str, Any], list[Any]] | None:
        copy, own = copied(model, taps, stand_ins)
        witnesses = [Witness.of(tap, i, Run.begun(), places, size) for i, tap in enumerate(own)]

        def forward(some: Sequence[Any]) -> list[Any]:
            again()
            some = [x.clone() if isinstance(x, Tensor) else x for x in some]
            for witness in witnesses:
                witness.inputs = some
            args, kwargs = structure.unflatten(some)
            with following_model(witnesses[0].taps, copy, some), torch.no_grad():
                return results_in(copy(*args, **kwargs))

        held = dict(_held(copy))  # which keeps them: others could have their ids
        before = _versions(held)
        forward(first)
        now = dict(_held(copy))
        if _versions(now) == before:
            return None
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in now.items()}, forward(leaves)

    one = two_passes(leaves)
    other = None if one is None else two_passes(exchanged)
    if one is None or other is None or _same(one[1], other[1]):
        return []
    repeated = two_passes(leaves)
    if repeated is None or not _same(one[1], repeated[1]):
        return []
    return [name for name, x in one[0].items() if not _same([x], [other[0].get(name)])] or ["what it keeps"]


def _versions(held: dict[str, Any]) -> dict[str, Any]:
    """Other ones where a pass has changed what is held."""
    return {name: (id(x), x._version) if isinstance(x, Tensor) else x for name, x in held.items()}


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers that its modules hold beside parameters, by names; also in objects of somebody's own,
    and in modules that are none of its children (kept in a list)."""
    seen = set(map(id, model.modules()))
    for name, module in model.named_modules():
        for attribute, value in (*module._buffers.items(), *vars(module).items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                yield from _parts(f"{name}.{attribute}" if name else attribute, value, seen, _DEPTH)


def _parts(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, int, float)):
        yield path, value
        return
    if isinstance(value, _HOLD_NOTHING) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, collections.deque)):
        inner = [(f"{path}[{i}]", x) for i, x in enumerate(value)]
    elif isinstance(value, dict):
        inner = [(f"{path}[{key!r}]", x) for key, x in value.items()]
    else:
        inner = [(f"{path}.{key}", x) for key, x in getattr(value, "__dict__", {}).items()]
    for name, x in inner:
        yield from _parts(name, x, seen, depth - 1)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """To the bit."""
    pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(some, others, strict=False) if _is_number(x, y)]
    return len(some) == len(others) and all(
        x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs
    )


def _is_number(*some: Any) -> bool:
    return all(isinstance(x, (Tensor, int, float)) for x in some)
