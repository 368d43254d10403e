"""Where each tap has its samples, learned and not assumed: the model's forward runs on fake tensors (shapes alone, no
memory and no arithmetic), with the batch of its inputs set to one prime and to another.

A dimension whose size differs between the two runs follows the batch; one that has the primes' sizes is that of the
samples. No size that happens to equal N looks like either.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpfast.taps.fake_run import Values, calls_in_forward, nothing_left_behind
from dpfast.taps.layout import Place, Places, note_kind, place_of, place_of_result
from dpfast.taps.passes import in_backward
from dpfast.taps.tap import Tap

_PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
_MOST_RUNS = 16
_MOST_LOOKS = 8  # a model that takes lists of tensors might see ever new ones
_WITHOUT_TENSORS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

Found = dict[tuple[int, Any], Place]
"""By the number of a tap and the rank of its output, or the way to an operation on what has no samples."""


class Probe:
    """Gives the taps of a model their places, once for each kind of input that the model is called with.

    Args:
        receiver: the tapped model.
        taps: its taps, when it is first called.
    """

    def __init__(self, receiver: Any, taps: Sequence[Tap]):
        self._receiver = weakref.ref(receiver)
        self._taps = taps
        self._looks: set[tuple[Any, ...]] = set()
        self._dims: dict[tuple[Any, ...], list[set[int]]] = {}  # of each input, those that may follow the batch

    def look(self, inputs: Any, leaves: Sequence[Any], n: int) -> None:
        """The model is called.

        Args:
            inputs: (args, kwargs). leaves: what is in them. n: how many samples the first tensor has.
        """
        receiver: Any = self._receiver()
        # Sizes and numbers do not count: batches and sequences of another length are of the same kind.
        kind: tuple[Any, ...] = (receiver.model.training, *inputs[1])
        kind += tuple(x.dim() if isinstance(x, Tensor) else x is True or type(x) for x in leaves)
        dims = [{d for d, s in enumerate(x.shape) if s == n} if isinstance(x, Tensor) else set() for x in leaves]
        for some, before in zip(dims, self._dims.get(kind, dims), strict=True):
            some &= before  # what once was not as long as the batch does not follow it
        self._dims[kind] = dims
        note_kind(receiver, kind)
        look = (*kind, *map(frozenset, dims))
        if look in self._looks or not (receiver.enabled and torch.is_grad_enabled()) or in_backward() is not None:
            return
        if len(self._looks) < _MOST_LOOKS:
            self._looks.add(look)
            follow = [receiver.batch_dim if receiver.batch_dim in some else min(some, default=None) for some in dims]
            found = learned(receiver.model, self._taps, inputs, leaves, follow)
            for i, tap in enumerate(self._taps):
                for rank in {*tap.places, *(rank for number, rank in found if number == i)}:
                    self._note(tap.places, rank, kind, found.get((i, rank)))
                tap.note_uses()

    def _note(self, places: dict[Any, Places], rank: Any, kind: Any, place: Place) -> None:
        before = places.get(rank, place)
        if isinstance(before, dict):
            before[kind] = place
        elif before == place or len(self._dims) == 1:
            places[rank] = place
        else:
            places[rank] = {**dict.fromkeys(self._dims, before), kind: place}


def learned(
    model: nn.Module, taps: Sequence[Tap], inputs: Any, leaves: Sequence[Any], dims: Sequence[int | None]
) -> Found:
    """The places of taps when the model is called with such inputs, of which these dimensions may follow the batch;
    none where it cannot run on fake tensors."""
    if not taps or not all(isinstance(x, _WITHOUT_TENSORS) or type(x) in (Tensor, nn.Parameter) for x in leaves):
        return {}
    if any(isinstance(_own_forward(m), types.FunctionType) for m in model.modules()):
        return {}  # a closure, which would run the model itself and not its copy
    leaves, structure = tree_flatten(inputs)
    sizes = {size for x in leaves for size in (x.shape if isinstance(x, Tensor) else [x]) if isinstance(size, int)}
    sizes |= {size for x in (*model.parameters(), *model.buffers()) for size in x.shape}
    primes = [p for p in _PRIMES if all(size == 0 or size % p for size in sizes)][:2]
    following = [i for i, dim in enumerate(dims) if dim is not None]
    runs = 0
    # Where not all of them can follow the batch (a (T, T) mask with T = N), as few as possible do not.
    for number in range(len(following)):
        found: list[Found] = []
        for fixed in itertools.combinations(following[1:], number):
            batched = [None if i in fixed else dim for i, dim in enumerate(dims)]
            found += _found(model, taps, leaves, structure, batched, primes)
            runs += 1
        if found or runs >= _MOST_RUNS:
            return _agreed(found)
    return {}


def _agreed(found: Sequence[Found]) -> Found:
    """What all runs say that say something."""
    together: Found = {}
    for places in found:
        for key, place in places.items():
            together[key] = place if together.get(key, place) == place else None
    return together


def _found(
    model: nn.Module, taps: Sequence[Tap], leaves: list[Any], structure: Any, dims: list[int | None], primes: list[int]
) -> list[Found]:
    """The places, with these dimensions of the inputs following the batch; several where the forward asks for values,
    which may be true or false; none where it does not run."""
    found = []
    for truth in (False, True):
        values = Values(truth)
        try:
            with nothing_left_behind(), values:
                first, second = (calls_in_forward(model, taps, leaves, structure, dims, size) for size in primes)
            found.append(_compared(taps, first, second, primes))
        except Exception:  # whatever a model raises that meets no values, or sizes that do not fit
            pass
        if not values.asked:
            break
    return found


def _compared(taps: Sequence[Tap], first: Any, second: Any, primes: list[int]) -> Found:
    """What two forwards tell together; nothing of a tap that they do not run equally often."""
    places: Found = {}
    for i, (tap, calls, others) in enumerate(zip(taps, first, second, strict=True)):
        if len(calls) != len(others):
            continue
        for (rank, call), (_, other) in zip(calls, others, strict=True):
            if isinstance(call, bool):
                place: Place = 0 if call and other else None
            elif isinstance(rank, tuple):
                place = place_of_result(call[1], other[1], primes)
            else:
                place = place_of(tap.module, tap.batch_dim, call, other, primes)
            if places.setdefault((i, rank), place) != place:
                places[i, rank] = "its samples are in different dimensions at different uses"
    return places


def _own_forward(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward")
    return getattr(forward, "replaced", forward)
