"""When it is looked at whose rows are whose, where a sample holds the tokens of several units (packed documents)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpfast.errors import InputError, warn_caller
from dpfast.looks.boundaries import shows
from dpfast.looks.called import looks_again_at
from dpfast.looks.document_look import DocumentLook, Told
from dpfast.taps import Tap, kind_here, leaves_of

_LONGER = 2
"""How many times as many tokens a row has than any that was looked at, to be looked at by itself."""


_NO_BACKWARD = (
    "{} could not be run backwards with some documents exchanged for others: {}. That no unit comes to another's "
    "gradient in the backward pass alone is taken on trust (docs/units.md#packed-documents)"
)
_ON_TRUST = "that units do not meet in this batch either, as they did not before, is taken on trust: {}"


class _Looked:
    """At inputs of one kind.

    Attributes:
        told: by all looks. forwards: since the first. longest: the most tokens that a row had.
    """

    def __init__(self, told: Told, longest: int):
        self.told, self.longest, self.forwards = told, longest, 0


class Documents:
    """Looks at a model when it is first called with inputs of a kind, when samples first hold several units, when rows
    are much longer than before, and at some of the later calls: a mask may be left out from then on.

    Args:
        receiver: the tapped model. taps: its taps, when it is first called.
    """

    def __init__(self, receiver: Any, taps: Sequence[Tap]):
        self._receiver = weakref.ref(receiver)
        self._taps = taps
        self._looked: dict[Any, _Looked] = {}
        self._has_said = False

    def look(self, inputs: Any, ids: Tensor) -> Told:
        """The model is called.

        Args:
            inputs: (args, kwargs). ids: the unit of each token, in the layout of the model's inputs.

        Raises:
            InputError: no input has these tokens; the model could not be run to tell whose rows are whose.
            UnsupportedModuleError: units meet in a layer.
        """
        receiver: Any = self._receiver()
        key, length = self._key(inputs, ids), ids.movedim(receiver.batch_dim, 0).flatten(1).shape[1]
        looked = self._looked.get(key)
        if looked is None:
            self._looked[key] = looked = _Looked(self._told(inputs, ids), length)
            return looked.told
        looked.forwards += 1
        if looks_again_at(looked.forwards) or length >= _LONGER * looked.longest:
            looked.longest = max(looked.longest, length)
            self._look_again(looked, inputs, ids)
        return looked.told

    def look_at_new(self, inputs: Any, ids: Tensor) -> Told:
        """The same, of a forward pass that has ended, in which something has run that no look has seen: an expert to
        which no token came before. What does not run now either stays unknown."""
        looked = self._looked[self._key(inputs, ids)]
        self._look_again(looked, inputs, ids)
        return looked.told

    def _look_again(self, looked: _Looked, inputs: Any, ids: Tensor) -> None:
        try:
            looked.told = looked.told.joined(self._told(inputs, ids))
        except InputError as error:  # a batch that tells nothing says nothing of the model
            warn_caller(_ON_TRUST.format(error))

    def _told(self, inputs: Any, ids: Tensor) -> Told:
        receiver: Any = self._receiver()
        told = DocumentLook(receiver, self._taps, inputs, ids).told()
        if told.failed is not None and not self._has_said:
            self._has_said = True
            warn_caller(_NO_BACKWARD.format(type(receiver.model).__name__, told.failed))
        return told

    def _key(self, inputs: Any, ids: Tensor) -> Any:
        """What is looked at by itself: a kind of inputs, and what they show of where units end."""
        receiver: Any = self._receiver()
        rows = ids.movedim(receiver.batch_dim, 0).flatten(1)
        somebodys, last = rows >= 0, rows.amax(1, keepdim=True)
        several = bool((rows.where(somebodys, last) < last).any())
        shown = tuple(shows(x, ids, receiver.batch_dim) for x in leaves_of(inputs) if isinstance(x, Tensor))
        return kind_here(receiver), several, bool(somebodys.all()), shown
