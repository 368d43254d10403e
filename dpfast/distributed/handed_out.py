"""Which draws a loop has been given, where its loader's workers have fetched more of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from dpfast.errors import InputError

Spans = tuple[tuple[int, int], ...]
"""Numbers, by the first and the last of those that are one behind another: where no step is taken they are many."""


class HandedOut:
    """The draws of one iteration over a batch sampler that no step has taken yet: those that were asked for, and those
    of them that the loop has been given.

    A loader asks for batches in the order in which it gives them, and counts both. Between it and the draws there may
    be who splits them (``BatchMemoryManager``), so what is noted of a draw is how many batches were asked for before.

    Attributes:
        ended: whether the sampler's iteration has; a loader may have batches of it left.
    """

    def __init__(self) -> None:
        self._loader: Any = None  # a weak reference to the iterator of a DataLoader; None where a loop asks by itself
        self._given = 0  # batches, once the loader has given what it asks for now
        self._draws: deque[tuple[int, int]] = deque()  # (batches asked for before, number)
        self.ended = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """A draw is asked for; ``frame``: by whom.

        Raises:
            InputError: a loader that gives batches in another order than it asks for them.
        """
        while frame is not None and not isinstance(frame.f_locals.get("self"), _BaseDataLoaderIter):
            frame = frame.f_back
        if frame is None:
            self._draws.append((-1, number))  # and given at once
            return
        loader = frame.f_locals["self"]
        if not getattr(loader, "_in_order", True):
            raise InputError(
                "DataLoader(in_order=False) gives draws in an order that ranks and repeated runs do not share, so a "
                "sample could be in the parts of two ranks; leave it out"
            )
        self._loader = weakref.ref(loader)
        self._given = loader._num_yielded + 1
        self._draws.append((getattr(loader, "_send_idx", loader._num_yielded), number))

    def is_over_for(self, other: HandedOut) -> None:
        """Ends where the same iterator of a loader begins another iteration, and counts anew (persistent workers)."""
        if self._loader is not None and self._loader == other._loader:
            self._loader = _gone

    @property
    def over(self) -> bool:
        """Whether nobody will be given more of it, nor what a loader had fetched."""
        return self.ended if self._loader is None else self._loader() is None

    @property
    def first(self) -> int | None:
        """The first number that no step has taken."""
        return min((number for _, number in self._draws), default=None)

    def given(self) -> list[int]:
        """The numbers that the loop has been given and no step has taken."""
        loader = None if self._loader is None else self._loader()
        given = self._given if loader is None else loader._num_yielded
        return [number for before, number in self._draws if before < given]

    def take(self, spans: Spans) -> None:
        """A step has taken these."""
        self._draws = deque(draw for draw in self._draws if not is_in(spans, draw[1]))


def _gone() -> None:
    """In the place of a weak reference."""


def is_in(spans: Spans, number: int) -> bool:
    return any(first <= number <= last for first, last in spans)


def joined(spans: Spans, numbers: Iterable[int]) -> Spans:
    """The spans and these, in order: the same on all ranks, whoever holds them there."""
    found: list[tuple[int, int]] = []
    for first, last in sorted([*spans, *((number, number) for number in numbers)]):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def without(spans: Spans, others: Spans) -> Spans:
    """What of the spans is in none of the others."""
    for begin, end in others:
        parts = (((first, min(last, begin - 1)), (max(first, end + 1), last)) for first, last in spans)
        spans = tuple((first, last) for pair in parts for first, last in pair if first <= last)
    return spans
