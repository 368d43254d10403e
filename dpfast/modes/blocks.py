"""What a thread has said of the batch that comes: ``with model.units(ids)``, ``with model.valid(mask)``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpfast.errors import StateError
from dpfast.taps import in_backward


class _Here(threading.local):
    """By wrapped model, what holds for its forward passes in this thread."""

    def __init__(self) -> None:
        self.of: dict[int, Any] = {}


class Blocks:
    """The blocks of one kind of all wrapped models. They are the model's, not its taps', which may be taken off and put
    on again within.

    Args:
        name: of the kind, in words. otherwise: what becomes of a forward pass outside.
    """

    def __init__(self, name: str, otherwise: str):
        self._name, self._otherwise = name, otherwise
        self._here, self._lock = _Here(), threading.Lock()
        self._of: dict[int, list[Any]] = {}  # of all threads. A GPU's backward pass runs in one that is within none

    @contextmanager
    def within(self, model: object, said: Any) -> Iterator[None]:
        """Until its end this holds for what the thread calls the model with."""
        number, here = id(model), self._here.of
        before = here.get(number)
        with self._lock:
            self._of.setdefault(number, []).append(said)
        here[number] = said
        try:
            yield
        finally:
            if before is None:
                del here[number]
            else:
                here[number] = before
            with self._lock:
                among = self._of[number]
                del among[next(i for i, x in enumerate(among) if x is said)]
                if not among:
                    del self._of[number]

    def here(self, model: object) -> Any:
        """What has been said; None: nothing."""
        return self._here.of.get(id(model))

    def of_forward(self, model: object) -> Any:
        """:meth:`here`, where a forward pass begins. Raises StateError where another thread is in such a block."""
        found = self.here(model)
        if found is None and id(model) in self._of and in_backward() is None:
            raise StateError(
                f"another thread is within {self._name} of this model, and this forward pass is outside of it, so "
                f"{self._otherwise}: enter {self._name} in the thread that calls the model"
            )
        return found

    def are_of(self, model: object, said: Any) -> bool:
        """Whether no thread is within a block, or one is in one that says this."""
        among = self._of.get(id(model))
        return among is None or any(x is said for x in among)


UNITS = Blocks("units(...)", "its samples would be clipped one by one")
VALID = Blocks("valid(...)", "its padding would count as samples")
