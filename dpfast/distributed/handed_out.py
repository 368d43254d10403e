"""Which draws a loop has been given, where its loader's workers have fetched more of them."""

from __future__ import annotations

import weakref
from collections import deque
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from dpfast.errors import InputError


class HandedOut:
    """The draws of one iteration over a batch sampler: those that were asked for and not given to the loop yet, and the
    last that was.

    A loader asks for batches in the order in which it gives them, and counts both. Between it and the draws there may
    be who splits them (``BatchMemoryManager``), so what is noted of a draw is how many batches were asked for before.
    """

    def __init__(self) -> None:
        self._loader: Any = None  # a weak reference to the iterator of a DataLoader; None where a loop asks by itself
        self._given = 0  # batches, once the loader has given what it asks for now
        self._draws: deque[tuple[int, int]] = deque()  # (batches asked for before, number)

    def note(self, number: int, frame: FrameType | None) -> None:
        """A draw is asked for; ``frame``: by whom.

        Raises:
            InputError: a loader that gives batches in another order than it asks for them.
        """
        while frame is not None and not isinstance(frame.f_locals.get("self"), _BaseDataLoaderIter):
            frame = frame.f_back
        if frame is None:
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

    @property
    def over(self) -> bool:
        """Whether there was a loader and it is gone: nobody will be given what it had fetched."""
        return self._loader is not None and self._loader() is None

    def last(self) -> int | None:
        """The number of the draw that the last batch is of; None where no loader asks."""
        if self._loader is None:
            return None
        loader = self._loader()
        given = self._given if loader is None else loader._num_yielded
        while len(self._draws) > 1 and self._draws[1][0] < given:
            self._draws.popleft()
        return self._draws[0][1]
