"""What a thread has said of the batch that comes: ``with model.units(ids)``, ``with model.valid(mask)``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpfast.errors import StateError
from dpfast.taps import in_backward


class _Here(threading.local):
    """By wrapped model, what holds for its forward passes in this thread: of several blocks the last one's."""

    def __init__(self) -> None:
        self.of: dict[int, list[Any]] = {}


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
        number = id(model)
        here = self._here.of.setdefault(number, [])
        here.append(said)
        with self._lock:
            self._of.setdefault(number, []).append(said)
        try:
            yield
        finally:
            is_last = here[-1] is said
            _remove(here, said)
            if not here and self._here.of.get(number) is here:  # a generator may be closed by another thread
                del self._here.of[number]
            with self._lock:
                _remove(self._of[number], said)
                if not self._of[number]:
                    del self._of[number]
        if not is_last:
            raise StateError(
                f"{self._name} ended while another one of this model, which began within it, goes on: forward passes "
                "since took what that one says. Enter and leave one after the other in each thread (tasks of asyncio "
                "and generators take turns within theirs)"
            )

    def here(self, model: object) -> Any:
        """What has been said; None: nothing."""
        among = self._here.of.get(id(model))
        return among[-1] if among else None

    def of_forward(self, model: object) -> Any:
        """:meth:`here`, where a forward pass begins. Raises StateError where another thread is in such a block, unless
        the pass has no gradients."""
        found = self.here(model)
        if found is None and id(model) in self._of and torch.is_grad_enabled() and in_backward() is None:
            raise StateError(
                f"another thread is within {self._name} of this model, and this forward pass is outside of it, so "
                f"{self._otherwise}: enter {self._name} in the thread that calls the model"
            )
        return found

    def are_of(self, model: object, said: Any) -> bool:
        """Whether no thread is within a block, or one is in one that says this."""
        among = self._of.get(id(model))
        return among is None or any(x is said for x in among)


def _remove(among: list[Any], said: Any) -> None:
    """The last one that is this."""
    del among[next(i for i in reversed(range(len(among))) if among[i] is said)]


UNITS = Blocks("units(...)", "its samples would be clipped one by one")
VALID = Blocks("valid(...)", "its padding would count as samples")
