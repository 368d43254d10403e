"""Where each tap has its samples, learned and not assumed: the model's forward runs on fake tensors (shapes alone, no
memory and no arithmetic), with the batch of its inputs set to one prime and to another.

A dimension whose size differs between the two runs follows the batch; one that has the primes' sizes is that of the
samples. No size that happens to equal N looks like either.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpfast.taps.exchange import calls_on_data, told_by_exchange
from dpfast.taps.fake_run import Values, calls_in_forward, fake_parameters, nothing_left_behind
from dpfast.taps.inputs import WITHOUT_TENSORS, Structure
from dpfast.taps.layout import Mixed, Place, Places, kind_here, note_kind, place_of, place_of_result
from dpfast.taps.passes import in_backward
from dpfast.taps.picks import NO_ROUTES, Routes
from dpfast.taps.routes import add_routes, routes_of
from dpfast.taps.tap import OWN, Tap

_PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
_SMALL = (3, 5, 2, 7, 11, 13, 17, 19, 23, 29)
_MOST_RUNS = 16
_AGAIN = 4  # looks at batches that tell too little (empty ones)
_MOST_LOOKS = 64  # a model that takes lists of tensors might see ever new ones

Found = dict[Any, Place]
"""By the number of a tap and the rank of its output, or the way to an operation on what has no samples."""


class Seen(NamedTuple):
    """What shapes tell: the places of taps, and the shapes of their outputs in words."""

    places: Found
    shapes: dict[Any, str]


class Learned(NamedTuple):
    """What runs of the model tell.

    Attributes:
        places: of taps. shapes: of their outputs, in words. outputs: of the model's outputs, by number, why a loss
            that is made of one has no gradients by sample.
        settled: nothing more would come of another look.
        routes: where rows are picked.
    """

    places: Found
    shapes: dict[Any, str]
    outputs: dict[int, str]
    settled: bool
    routes: Routes = NO_ROUTES


_NOTHING = Learned({}, {}, {}, settled=True)


class Probe:
    """Gives the taps of a model their places, once for each kind of input that the model is called with.

    Args:
        receiver: the tapped model.
        taps: its taps, when it is first called.
    """

    def __init__(self, receiver: Any, taps: list[Tap]):
        self._receiver = weakref.ref(receiver)
        self._taps = taps
        self._looks: dict[tuple[Any, ...], int] = {}  # how many more each may have
        self.outputs: dict[Any, dict[int, str]] = {}  # of the model's outputs, by kind: those that mix samples
        self._asks_no_more = False
        self._dims: dict[tuple[Any, ...], list[set[int]]] = {}  # of each input, those that may follow the batch

    def look(self, inputs: Any, leaves: Sequence[Any], n: int, trainable: bytes) -> bool:
        """The model is called.

        Args:
            inputs: (args, kwargs). leaves: what is in them. n: how many samples the first tensor has.
            trainable: which of the model's parameters are.

        Returns:
            whether such inputs had not been seen.
        """
        receiver: Any = self._receiver()
        # Sizes and numbers do not count: batches and sequences of another length are of the same kind. Which parameters
        # are trainable does: a frozen one stands in operations as any tensor, and no gradient of it is followed there.
        kind: tuple[Any, ...] = (trainable, receiver.model.training, *inputs[1])
        kind += tuple(x.dim() if isinstance(x, Tensor) else x is True or type(x) for x in leaves)
        dims = [{d for d, s in enumerate(x.shape) if s == n} if isinstance(x, Tensor) else set() for x in leaves]
        if self._asks_no_more:  # its batches may be as long as something else by accident where the other's were not
            known = next((k for k in self.outputs if k[: len(kind)] == kind), None)
            note_kind(receiver, known)
            return False
        by_accident = _alike_by_accident(leaves, dims)
        for some, before in zip(dims, self._dims.get(kind[1:], dims), strict=True):
            some &= before  # what once was not as long as the batch does not follow it
        self._dims[kind[1:]] = dims
        kind += by_accident
        note_kind(receiver, kind)
        look = (*kind, *map(frozenset, dims))
        if self._looks.get(look, 1) == 0 or not (receiver.enabled and torch.is_grad_enabled()):
            return False
        if look not in self._looks and len(self._looks) >= _MOST_LOOKS:
            # With other parameters frozen all is as it was, but what is not known by its way is an error.
            note_kind(receiver, next((k for k in self.outputs if k[1:] == kind[1:]), None))
            return False
        if in_backward() is None:
            follow = [receiver.batch_dim if receiver.batch_dim in some else min(some, default=None) for some in dims]
            found = learned(receiver.model, self._taps, inputs, leaves, follow, n)
            if add_routes(receiver, self._taps, found.routes):
                found = learned(receiver.model, self._taps, inputs, leaves, follow, n)
            self._looks[look] = 0 if found.settled else self._looks.get(look, _AGAIN) - (n > 0)
            self.outputs[kind] = found.outputs
            for i, tap in enumerate(self._taps):
                for rank in {*tap.places, *(rank for number, rank in found.places if number == i)}:
                    self._note(tap.places, rank, kind, found.places.get((i, rank)))
                    if (i, rank) in found.shapes:
                        tap.shapes[rank] = found.shapes[i, rank]
                tap.note_uses()
        return True

    @property
    def is_settled(self) -> bool:
        """Whether another look would tell no more."""
        return not any(self._looks.values())

    def knows(self, other: Probe) -> None:
        """What the other has learned of the same model, of which this one's is a copy, which asks no more."""
        self._asks_no_more, self.outputs = True, dict(other.outputs)
        receiver: Any = self._receiver()
        original: Any = other._receiver()
        add_routes(receiver, self._taps, routes_of(original, other._taps))
        named = {tap.name: tap for tap in other._taps}
        for tap, like in ((tap, named[tap.name]) for tap in self._taps):
            tap.places, tap.shapes = dict(like.places), dict(like.shapes)
            tap.note_uses()

    def mixed_outputs(self) -> dict[int, str]:
        """Of the model's outputs, by number, why those have no gradients by sample that have none."""
        return self.outputs.get(kind_here(self._receiver()), {})

    def _note(self, places: dict[Any, Places], rank: Any, kind: Any, place: Place) -> None:
        before = places.get(rank, place)
        if isinstance(before, dict):
            before[kind] = place
        elif before == place or self.outputs.keys() == {kind}:
            places[rank] = place
        else:
            places[rank] = {**dict.fromkeys(self.outputs, before), kind: place}


def _alike_by_accident(leaves: Sequence[Any], dims: Sequence[set[int]]) -> tuple[Any, ...]:
    """The shapes, numbers and names, where an input is as long as the batch in another dimension too: a forward that
    goes by these may go another way then, and nobody would see it."""
    if all(len(some) < 2 for some in dims):
        return ()
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x if isinstance(x, (int, str)) else None for x in leaves)


def learned(
    model: nn.Module, taps: Sequence[Tap], inputs: Any, leaves: Sequence[Any], dims: Sequence[int | None], n: int
) -> Learned:
    """What is told when the model is called with such inputs, of which these dimensions may follow the batch of n
    samples; nothing where it runs neither on fake tensors nor on a few of the samples."""
    if not taps or not all(isinstance(x, WITHOUT_TENSORS) or type(x) in (Tensor, nn.Parameter) for x in leaves):
        return _NOTHING
    if any(isinstance(_own_forward(m), types.FunctionType) for m in model.modules()):
        return _NOTHING  # a closure, which would run the model itself and not its copy
    structure = Structure(inputs)
    leaves = structure.leaves
    sizes = {size for x in leaves for size in (x.shape if isinstance(x, Tensor) else [x]) if isinstance(size, int)}
    inside = {size for x in (*model.parameters(), *model.buffers()) for size in x.shape}
    primes = [p for p in _PRIMES if all(size == 0 or size % p for size in sizes | inside)][:2]
    found, batched = _by_shapes(dims, lambda some: _found(model, taps, leaves, structure, some, primes))
    if batched is None and n:
        primes = [p for p in _SMALL if p not in sizes][:2]
        found, batched = _by_shapes(dims, lambda some: _found_on_data(model, taps, leaves, structure, some, primes))
    if batched is None:
        return _NOTHING._replace(settled=n > 0)
    places, shapes = found
    told = told_by_exchange(model, taps, leaves, structure, batched, places, n) if n else None
    if told is not None:
        places.update(told.places)
        for number in {number for (number, _), place in told.places.items() if isinstance(place, Mixed)}:
            places[number, (OWN,)] = None  # its operations one by one would not show it
    if told is None:
        return Learned(places, shapes, {}, settled=n > 0)
    return Learned(places, shapes, told.outputs, settled=n > 0 and told.changed, routes=told.routes)


def _by_shapes(
    dims: Sequence[int | None], run: Callable[[list[int | None]], list[Seen]]
) -> tuple[Seen, list[int | None] | None]:
    """What runs tell, and which dimensions of the inputs followed the batch in them; None where none of them runs.

    Where not all can follow the batch (a (T, T) mask with T = N), as few as possible do not.
    """
    following = [i for i, dim in enumerate(dims) if dim is not None]
    runs = 0
    for number in range(len(following)):
        found: list[Seen] = []
        batched: list[int | None] = []
        for fixed in itertools.combinations(following[1:], number):
            some = [None if i in fixed else dim for i, dim in enumerate(dims)]
            new = run(some)
            batched = batched or (some if new else [])
            found += new
            runs += 1
        if found:
            return _agreed(found), batched
        if runs >= _MOST_RUNS:
            break
    return Seen({}, {}), None


def _agreed(found: Sequence[Seen]) -> Seen:
    """What all runs say that say something."""
    together = Seen({}, {})
    for places, shapes in found:
        for key, place in places.items():
            together.places[key] = place if together.places.get(key, place) == place else None
            together.shapes.update({key: shapes[key]} if key in shapes else {})
    return together


def _found(
    model: nn.Module, taps: Sequence[Tap], leaves: list[Any], structure: Any, dims: list[int | None], primes: list[int]
) -> list[Seen]:
    """The places, with these dimensions of the inputs following the batch; several where the forward asks for values,
    which may be true or false; none where it does not run."""
    found = []
    with nothing_left_behind():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        parameters = fake_parameters(model, mode)
    for truth in (False, True):
        values = Values(truth)
        try:
            with nothing_left_behind(), values:
                first, second = (
                    calls_in_forward(mode, parameters, model, taps, leaves, structure, dims, size) for size in primes
                )
            found.append(_compared(taps, first, second, primes))
        except Exception:  # whatever a model raises that meets no values, or sizes that do not fit
            pass
        if not values.asked:
            break
    return found


def _found_on_data(
    model: nn.Module, taps: Sequence[Tap], leaves: list[Any], structure: Any, dims: list[int | None], sizes: list[int]
) -> list[Seen]:
    """The same from the samples themselves."""
    try:
        first, second = (calls_on_data(model, taps, leaves, structure, dims, size) for size in sizes)
    except Exception:  # as above
        return []
    return [_compared(taps, first, second, sizes)]


def _compared(taps: Sequence[Tap], first: Any, second: Any, sizes: list[int]) -> Seen:
    """What two forwards tell together; nothing of a tap that they do not run equally often."""
    seen = Seen({}, {})
    for i, (tap, calls, others) in enumerate(zip(taps, first, second, strict=True)):
        if len(calls) != len(others):
            continue
        for (rank, call), (_, other) in zip(calls, others, strict=True):
            if isinstance(call, bool):
                place: Place = 0 if call and other else None
            elif isinstance(rank, tuple):
                place = place_of_result(call[1], other[1], sizes)
            else:
                place = place_of(tap.module, call, other, sizes)
                one, two = (", ".join(str(tuple(x)) for x in outputs) for _, outputs in (call, other))
                seen.shapes[i, rank] = f"{one} of {sizes[0]} samples and {two} of {sizes[1]}"
            if seen.places.setdefault((i, rank), place) != place:
                seen.places[i, rank] = "its samples are in different dimensions at different uses"
    return seen


def _own_forward(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward")
    return getattr(forward, "replaced", forward)
