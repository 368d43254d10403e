"""When the taps of a model are given their places (:mod:`dpfast.looks.learned`): once for each kind of input that the
model is called with, and again now and then for what the first look did not show.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import torch

from dpfast.arithmetic import buffers
from dpfast.errors import UnsupportedModuleError, warn_caller
from dpfast.looks.begun_late import New, like_those_seen, rank_of, samples_of
from dpfast.looks.called import Called, Due, Looks, entries_of, leaves_but
from dpfast.looks.carried import refuse_carried
from dpfast.looks.exchange import told_by_exchange
from dpfast.looks.kinds import alike_by_accident, kind_of, kinds_of_entries
from dpfast.looks.learned import NOTHING, SAMPLES, Found, Learned, with_own
from dpfast.looks.listed import Lists, is_counted_by_entries, listed_alone
from dpfast.looks.place_look import with_places
from dpfast.looks.routes import add_routes, routes_of
from dpfast.looks.switches import Switches
from dpfast.looks.told import say_what_is_not_told
from dpfast.taps import (
    NO_BAGS,
    NOT_RUN,
    Bags,
    Mixed,
    OtherRows,
    Place,
    Places,
    Record,
    Rows,
    Tap,
    check_counted,
    check_leaves,
    check_which_is_the_batch,
    in_backward,
    kind_here,
    leaves_of,
    note_kind,
    place_in,
    warn_of_lists,
)
from dpfast.trials import MOST_DRAWS, Path, not_followed, same_random_numbers

_MORE_SAMPLES = 8  # for what three do not show: groups, parts of the batch
_SOME_SAMPLES = 4  # three of which are exchanged
_LATER_PASSES = (1, 3, 2)  # after the one that has run
_AGAIN = 4  # looks at batches that tell too little (empty ones)
_MOST_LOOKS = 64  # a model that takes lists of tensors might see ever new ones

_NOT_LOOKED_AT = (
    "{} could not be run to see what it does with samples: {}. That it does not mix them, and that its layers have "
    "them in the batch's order and dimension, is taken on trust: if it is not so, clipping bounds nothing "
    "(docs/layouts.md)"
)

_NOT_SEEN = (
    "{} runs now and in no trial of the model (a branch that this batch alone takes? a count that the forward keeps? a "
    "hook?). That it has samples in the batch's order and dimension and does not mix them is taken on trust: if it is "
    "not so, clipping bounds nothing (docs/layouts.md)"
)

_TOO_MANY = f"this is another kind of input than the {_MOST_LOOKS} that were looked at (and so are later ones)"


class Probe:
    """Gives the taps of a model their places, once for each kind of input that the model is called with.

    Args:
        receiver: the tapped model.
        taps: its taps, when it is first called.
    """

    def __init__(self, receiver: Any, taps: list[Tap]):
        self._receiver = weakref.ref(receiver)
        self._taps = taps
        self._looks: dict[tuple[Any, ...], Looks] = {}
        self.outputs: dict[Any, dict[int | str, str]] = {}  # of the model's outputs, by kind: those that mix samples
        self._parted: dict[Any, Mapping[int, Sequence[int]] | None] = {}  # likewise
        self._asks_no_more = self._is_full = False
        self._is_checked = True  # which of the inputs has the samples, since the last first look
        self._dims: dict[tuple[Any, ...], list[set[int]]] = {}  # of each input, those that may follow the batch
        self._bags: dict[tuple[Any, ...], Bags] = {}  # by kinds of input
        self._paths: set[Path] = set()  # where entries have been
        self.lists = Lists()
        self._due: Due | None = None
        self._called: Called | None = None
        self._seen: dict[Any, set[Any]] = {}  # what has been told of, by kind: numbers of taps, and ranks
        self._new: list[New] = []  # what runs beside
        self._switches = Switches()

    def look(self, inputs: Any, leaves: Sequence[Any], n: int | None, trainable: bytes) -> bool:
        """The model is called.

        Args:
            inputs: (args, kwargs). leaves: what is in them. n: how many samples the first tensor has, if there is one.
            trainable: which of the model's parameters are.

        Returns:
            whether more than the second look was to be had: a loss need not be looked at again so soon.

        Raises:
            InputError: there is none, or it is nested, or one is sparse. UnsupportedModuleError: a forward pass keeps
                something of its samples.
        """
        receiver: Any = self._receiver()
        self._called, self._new = None, []
        if receiver.enabled:
            check_leaves(receiver.model, leaves, n, receiver.batch_dim)
        n = self.lists.number(inputs, leaves, n, receiver.batch_dim)
        if n is None:
            return False
        kind = kind_of(inputs, leaves, trainable, modes := self._switches.modes(receiver.model))
        bags = self._bags.get(kind[1:], NO_BAGS)
        entries = entries_of(receiver, inputs, n := bags.number(leaves, n), self._paths)
        if entries:
            leaves = leaves_but(entries, inputs)
            kind = (*kind_of(inputs, leaves, trainable, modes), *kinds_of_entries(entries))
        anyhow, dims = kind[1:], bags.dims(leaves, n)  # whatever is trainable
        if self._asks_no_more:  # its batches may be as long as something else by accident where the other's were not
            known = next((k for k in self.outputs if k[: len(kind)] == kind), None)
            note_kind(receiver, known)
            return False
        kind = (*kind, *alike_by_accident(leaves, dims))
        for some, before in zip(dims, self._dims.get(anyhow, dims), strict=True):
            some &= before  # what once was not as long as the batch does not follow it
        called = Called(inputs, leaves, bags, dims, n, entries)
        note_kind(receiver, kind)
        look = (*kind, *map(frozenset, dims))
        due = Due(anyhow, dims, look)
        self._due, self._called = due, called  # which another thread's forward may end meanwhile
        if not (receiver.enabled and torch.is_grad_enabled()):
            return False
        looks = self._looks.get(look)
        if looks is not None and (n == 0 or not looks.one_more(n)):  # an empty batch tells nothing
            return False
        if look not in self._looks and len(self._looks) >= _MOST_LOOKS:
            # With other parameters frozen all is as it was, but what is not known by its way is an error.
            note_kind(receiver, next((k for k in self.outputs if k[1:] == kind[1:]), None))
            if not self._is_full:
                self._due = due._replace(look=None, why=_TOO_MANY)
            return False
        if in_backward() is not None:
            return True
        if looks is not None and looks.due == 0:
            few = min(n, _SOME_SAMPLES) if looks.forwards == 1 else n
            why = self._look_again(called, kind, looks.first, few, at_once=True, looks=looks)
            self._due = due._replace(why=why)
            return looks.forwards > 1
        self._is_checked = n == 0
        found = called.learned(receiver, self._taps)
        if found.bags is not None:
            self._bags[anyhow] = found.bags
            return self.look(inputs, leaves, n, trainable)
        if self.lists.are_samples_now(receiver, self._taps, inputs, found, self._paths):
            return self.look(inputs, leaves_of(inputs), n, trainable)
        if bags is NO_BAGS and n > 1:
            dim = receiver.batch_dim
            if found.told.why is None or not is_counted_by_entries(called, dim):  # else that is an error
                on_trust = not_followed(entries, found.dims[len(leaves) :])
                warn_of_lists(receiver.model, dim, called, on_trust, listed_alone(called, dim))
        if add_routes(receiver, self._taps, found.told.routes):
            found = called.learned(receiver, self._taps)
        refuse_carried(receiver.model, found.told.carried)
        say_what_is_not_told(receiver.model, found.told)
        if found.told.why is None:  # else it may be a batch that the model cannot take, which tells nothing of the next
            left, alone = (_AGAIN, True) if looks is None else (looks.due, looks.alone)
            self._looks[look] = Looks(0 if found.settled else left - (n > 0), found, alone and n == 1)
        self._note_first(kind, found)
        why = found.told.why
        if n > SAMPLES and found.dims and why is None:
            why = self._look_again(called, kind, found, n)
        self._due = due._replace(why=why)
        return True

    def _note_first(self, kind: Any, found: Learned) -> None:
        """What the first look at inputs of a kind has told."""
        self.outputs[kind], self._parted[kind] = found.told.outputs, found.told.parted
        if found.dims and found.told.why is None:
            self._seen[kind] = {*found.places, *found.told.packed, *found.told.ran}
        else:  # on trust
            self._seen.pop(kind, None)
        for i, tap in enumerate(self._taps):
            for rank in {*tap.places, *(rank for number, rank in found.places if number == i)}:
                self._note(tap.places, rank, kind, found.places.get((i, rank)))
                if (i, rank) in found.shapes:
                    tap.shapes[rank] = found.shapes[i, rank]
            tap.note_uses()

    def _look_again(
        self, called: Called, kind: Any, first: Learned, n: int, at_once: bool = False, looks: Looks | None = None
    ) -> str | None:
        """With up to so many samples, and the numbers of now. What is wrong counts, and nothing else, but that a layer
        has several rows a sample now, of ``looks``. Returns why it could not be run."""
        receiver: Any = self._receiver()
        size = min(max(n, SAMPLES), _MORE_SAMPLES)
        places = {**first.by_shapes, **{key: x for key, x in first.told.places.items() if isinstance(x, Rows)}}
        trial, dims = called.again(first)
        refused = self.outputs.get(kind, {})  # once is enough: what is wrong is run again in several ways
        of_model = receiver.model, self._taps, trial, dims, places, (size,)
        told = told_by_exchange(*of_model, at_once=at_once, refused=refused)
        if at_once and n > 1:
            told = with_places(told, *of_model[:-2], (2, n), refused)
        buffers.give_back()  # a step takes less
        others = [key for key, place in told.places.items() if isinstance(place, OtherRows)]
        if others and looks is not None and self._have_rows(called, kind, others, looks):
            return self._look_again(called, kind, looks.first, n, at_once)
        refuse_carried(receiver.model, told.carried)
        say_what_is_not_told(receiver.model, told)
        self.outputs[kind] = {**told.outputs, **refused}  # the first time told which samples meet
        if not at_once:  # of samples that are all exchanged but one, what they share is not seen
            self._seen.get(kind, set()).update(told.ran)
        wrong: Found = {key: place for key, place in told.places.items() if isinstance(place, str)}
        for (number, rank), place in with_own(wrong).items():
            self._note(self._taps[number].places, rank, kind, place)
            self._taps[number].note_uses()
        return told.why

    def _have_rows(self, called: Called, kind: Any, keys: Sequence[Any], looks: Looks) -> bool:
        """Whether it is told whose the rows are of these, which had one a sample; then it is noted."""
        receiver: Any = self._receiver()
        found = called.learned(receiver, self._taps)
        rows: Found = {key: place for key in keys if isinstance(place := found.places.get(key), Rows)}
        if found.told.why is not None or len(rows) < len(keys):
            return False
        refuse_carried(receiver.model, found.told.carried)
        self._add(kind, found, looks)
        looks.first = looks.first._replace(by_shapes={**looks.first.by_shapes, **rows})
        for (number, rank), place in rows.items():
            self._note(self._taps[number].places, rank, kind, place)
        return True

    def is_new(self, tap: Tap, record: Record, shape: tuple[int, ...] | None) -> bool:
        """Whether the tap runs and has not when the model was looked at: a branch, or a layer that random numbers, or a
        switch of the model's own, let out. Then that is done when the forward has ended."""
        seen = None if self._asks_no_more else self._seen.get(kind_here(self._receiver()))
        # Operations have their way. What a backward pass repeats has run without taps before.
        if seen is None or tap.sends or not record.batch_size or record.created_in is not None:
            return False
        if tap.layer in seen or tap not in self._taps:
            return False
        if (self._taps.index(tap), rank_of(shape)) in seen:
            return False
        self._new.append((tap, record, shape))
        return True

    def _look_at_new(self, called: Called, new: Sequence[New], looks: Looks | None) -> dict[Any, str]:
        """What has just run for the first time is looked at, as it is now, once. Returns the layers that no trial has
        run: those are taken on trust, when that has been said.

        Raises:
            UnsupportedModuleError: samples meet, in a layer that has been looked at before too.
            InputError: a layer that no trial has run may have its samples in several dimensions.
        """
        kind = kind_here(self._receiver())
        seen, where = self._seen[kind], [(self._taps.index(tap), rank_of(shape)) for tap, _, shape in new]
        mixed, keys, receiver = self._mixed(kind), list(zip(new, where, strict=True)), cast(Any, self._receiver())
        experts = [key for (_, record, _), key in keys if record.picked is not None]
        seen.update(like_those_seen(receiver.model, self._taps, experts, seen))
        picks = len(experts) < len(keys) and self._look_with(called, looks, seen, {*where}.difference(experts))
        before = -1
        while not picks and looks is not None and before < len(seen):  # experts, each with samples of its own
            rest, before = samples_of([record for (_, record, _), key in keys if key not in seen]), len(seen)
            if rest:
                self._look_again(called.in_front(rest, receiver), kind, looks.first, called.n)
        for key, why in self._mixed(kind).items():
            if key not in mixed and key not in where:  # whose place this forward has taken already
                raise UnsupportedModuleError(f"{self._taps[key[0]].layer}: {why}")
        unseen = {key: tap.layer for (tap, _, _), key in keys if not (picks or key in seen)}
        seen.update(set(where) - unseen.keys())
        for tap, record, shape in new:
            place = tap.places.get(rank_of(shape))
            place = place.get(kind) if isinstance(place, dict) else place
            if record.picked is not None:
                record.place = record.picked.place(place)
                continue
            # Rows that were picked in this forward have not been followed.
            record.place = NOT_RUN if picks else place_in(tap, place, shape, record.batch_size or 0)
        return unseen

    def _look_with(self, called: Called, looks: Looks | None, seen: set[Any], where: Set[Any]) -> bool:
        """Adds to what is seen of what is new. Returns whether rows are found to be picked that were not followed."""
        receiver: Any = self._receiver()
        kind, picks = kind_here(receiver), False
        with same_random_numbers() as again:
            for _ in range(MOST_DRAWS):
                found = called.learned(receiver, self._taps)
                if add_routes(receiver, self._taps, found.told.routes):
                    picks, found = True, called.learned(receiver, self._taps)
                refuse_carried(receiver.model, found.told.carried)
                if found.told.why is None:
                    self._add(kind, found, looks)
                if seen.issuperset(where) or not found.told.draws:
                    break
                again.draw()
        for passes in _LATER_PASSES:  # a layer may run in every second or fourth
            if seen.issuperset(where) or picks or found.told.why is not None:
                break
            later = called.learned(receiver, self._taps, passes)
            refuse_carried(receiver.model, later.told.carried)
            if later.told.why is None:
                self._add(kind, later, looks)
        if found.told.why is None and found.dims and called.n > SAMPLES:
            self._look_again(called, kind, found, called.n)
        return picks

    def _add(self, kind: Any, found: Learned, looks: Looks | None) -> None:
        """What another look has told of what is new, or wrong."""
        seen = self._seen[kind]
        for (number, rank), place in found.places.items():
            if (number, rank) not in seen or isinstance(place, str):
                self._note(self._taps[number].places, rank, kind, place)
                self._taps[number].note_uses()
        self.outputs[kind] = {**self.outputs[kind], **found.told.outputs}
        seen.update(found.places, found.told.ran)
        if looks is not None:
            looks.first = looks.first._replace(by_shapes={**found.by_shapes, **looks.first.by_shapes})

    def _mixed(self, kind: Any) -> dict[Any, str]:
        """Numbers of taps and ranks where samples meet, and why."""
        places = {(i, rank): place for i, tap in enumerate(self._taps) for rank, place in tap.places.items()}
        of_kind = {key: place.get(kind) if isinstance(place, dict) else place for key, place in places.items()}
        return {key: place for key, place in of_kind.items() if isinstance(place, Mixed)}

    @property
    def is_settled(self) -> bool:
        """Whether another look would tell no more."""
        return not any(looks.due for looks in self._looks.values())

    def knows(self, other: Probe) -> None:
        """What the other has learned of the same model, of which this one's is a copy, which asks no more."""
        self._asks_no_more, self.outputs = True, dict(other.outputs)
        self._paths, self.lists, self._switches = other._paths, other.lists, Switches(other._switches)
        receiver, original = cast(Any, self._receiver()), cast(Any, other._receiver())
        receiver.gives_batches = original.gives_batches
        add_routes(receiver, self._taps, routes_of(original, other._taps))
        named = {tap.name: tap for tap in other._taps}
        for tap, like in ((tap, named[tap.name]) for tap in self._taps):
            tap.places, tap.shapes = dict(like.places), dict(like.shapes)
            tap.note_uses()

    def forward_ended(self, output: Any) -> None:
        """Where it ran and could not be looked at, this is said, once; what it failed with is as if it never came."""
        self._switches.hold()
        due, called, new = self._due, self._called, self._new
        self._due, self._called, self._new = None, None, []
        if due is None or (output is None and sys.exc_info()[0] is not None):
            return
        unseen: dict[Any, str] = {}
        if new and called:
            unseen = self._look_at_new(called, new, None if due.look is None else self._looks.get(due.look))
        if unseen:  # said first, as below
            warn_caller(_NOT_SEEN.format(", ".join(unseen.values())))
            self._seen[kind_here(self._receiver())].update(unseen)
        receiver: Any = self._receiver()
        if called is not None and not self._is_checked:
            self._is_checked = check_which_is_the_batch(
                receiver.model, receiver.batch_dim, called.n, called.leaves, output, self.parted_outputs() or {}
            )
        self._dims[due.kind] = due.dims
        if due.why is not None:
            if called is not None and due.look not in self._looks:  # its entries may have been taken for the samples
                check_counted(receiver.model, called.inputs, receiver.batch_dim, due.why)
            # First: where warnings are errors, the next forward pass is told again.
            warn_caller(_NOT_LOOKED_AT.format(type(receiver.model).__name__, due.why))
            if due.look is not None:
                self._looks[due.look] = Looks(0, NOTHING)
        self._is_full = self._is_full or due.why is _TOO_MANY

    def mixed_outputs(self) -> dict[int | str, str]:
        """Of the model's outputs, by number, and what it keeps in attributes, by name, why those have no gradients by
        sample that have none."""
        return self.outputs.get(kind_here(self._receiver()), {})

    def parted_outputs(self) -> Mapping[int, Sequence[int]] | None:
        """Of the model's outputs, by number, the dimensions in which exchanged samples stayed apart; None where none
        were exchanged."""
        return self._parted.get(kind_here(self._receiver()))

    def _note(self, places: dict[Any, Places], rank: Any, kind: Any, place: Place) -> None:
        before = places.get(rank)
        if isinstance(before, dict):
            before[kind] = place
        elif before == place or self.outputs.keys() == {kind}:
            places[rank] = place
        else:
            places[rank] = {**dict.fromkeys(self.outputs, before), kind: place}
