"""What is told by runs of a model in which samples are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from dpfast.errors import warn_caller
from dpfast.looks.picks import NO_ROUTES, Routes
from dpfast.looks.seen import Key
from dpfast.taps import Place

_OF_LENGTHS = (
    "{} could not be run to see what the lengths of its packed sequences do to other samples: {}. That a sample's "
    "gradient does not change with how long the longest of its batch is (a mean or maximum over padded time) is taken "
    "on trust: if it is not so, clipping bounds nothing (docs/layouts.md)"
)
_OF_NOISE = (
    "{} runs with other samples in the places of some, but not with noise on what its layers give: {}. That no sample "
    "comes to another's gradient by what is zero now, or in a backward pass alone, is taken on trust: if it is not so, "
    "clipping bounds nothing; a forward that refuses values can do so in eval() alone (docs/layouts.md)"
)
_OF_KEPT = (
    "{} keeps something of a forward pass, and could not be run to see whether samples change the passes after their "
    "own: {}. That they do not is taken on trust: if it is not so, a sample moves sums of later steps, past clipping "
    "(docs/layouts.md)"
)


class Told(NamedTuple):
    """What the runs tell.

    Attributes:
        places: of taps, where they correct what shapes tell.
        outputs: of the model's outputs, by number, and of what its modules keep in attributes, by name, why a loss made
            of one has no gradients by sample.
        changed: whether anything has changed at all.
        routes: where rows are picked. why: nothing is told. carried: of :func:`carried.carried`.
        parted: of the model's outputs, by number, the dimensions in which samples stay apart; None: not run.
        lengths: why nothing is told of what the lengths of packed sequences do to other samples. noise: why there was
            none in the runs. kept: why nothing is told of what a pass keeps for the next ones.
        draws: whether random numbers were drawn. ran: experts that did. not_run: taps that ran in no run.
        packed: layers that took packed sequences, of which nothing is told.
    """

    places: dict[Key, Place]
    outputs: dict[int | str, str]
    changed: bool
    routes: Routes = NO_ROUTES
    why: str | None = None
    carried: Sequence[str] = ()
    parted: Mapping[int, list[int]] | None = None
    not_run: frozenset[Key] = frozenset()
    packed: frozenset[str] = frozenset()
    ran: frozenset[Key] = frozenset()
    draws: bool = False
    lengths: str | None = None
    noise: str | None = None
    kept: str | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether it says of anything that its samples do not part."""
        return bool(self.outputs) or any(isinstance(place, str) for place in self.places.values())


NOTHING = Told({}, {}, changed=True)


def together(one: Told, two: Told) -> Told:
    """What runs with some random numbers and with others tell; what one says is wrong is wrong."""
    more = {key: place for key, place in two.places.items() if key not in one.places or isinstance(place, str)}
    parted = None
    if one.parted is not None and two.parted is not None:
        parted = {i: [d for d in dims if d in two.parted.get(i, dims)] for i, dims in one.parted.items()}
    return one._replace(
        places={**one.places, **more},
        outputs={**two.outputs, **one.outputs},
        changed=one.changed or two.changed,
        why=one.why or two.why,
        parted=parted,
        not_run=one.not_run & two.not_run,
        packed=one.packed | two.packed,
        ran=one.ran | two.ran,
        draws=one.draws or two.draws,
    )


_said: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def say_what_is_not_told(model: nn.Module, told: Told) -> None:
    """Warns, once for a model, of each."""
    for message, why in ((_OF_LENGTHS, told.lengths), (_OF_NOISE, told.noise), (_OF_KEPT, told.kept)):
        if why is not None and message not in _said.setdefault(model, set()):
            _said[model].add(message)
            warn_caller(message.format(type(model).__name__, why))
