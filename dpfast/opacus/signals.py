"""Which steps are to be skipped, as ``BatchMemoryManager`` says; and the draw of a loop over it that was given up.

Opacus says "skip this step" when a part is fetched, not when it is used, and keeps it in a queue. Where a loop ends
early (Ctrl-C, out of memory, ``break``) parts of a draw wait in ``p.summed_grad``, and the queue has signals of parts
that nobody will use, with workers those of many. The next loop would add another draw to the first, and one sample
could count twice in what gets the noise of one; and its steps would end where no draw does. So would those of a loop
that leaves out a part (``continue``), from there on.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, SupportsIndex

from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dpfast.errors import StateError, warn_caller
from dpfast.modes import wait_for_noise
from dpfast.opacus.draws import Draws

_FETCHED = (
    "{} parts of draws were fetched through BatchMemoryManager and not stepped on, and its loader is gone through once "
    "more: which step is to be skipped is not known. What waited has been dropped, and nothing was released. Where the "
    "loop was given up, start it again, and enter BatchMemoryManager anew; fetch no part ahead of the loop, and look "
    "at other batches than its own in between"
)
_TWO_LOOPS = (
    "a loop over BatchMemoryManager goes on after another one with the same optimizer began, or after an error that "
    "gave it up, which has dropped what this one had fetched: which step is to be skipped is not known. Nothing was "
    "released; evaluate on batches that do not come through this optimizer's BatchMemoryManager"
)
_LEFT_OUT = (
    "BatchMemoryManager's loader has given part {given} (counted from 0), and the next step() is that of part {waits}: "
    "one was not stepped on, or twice, or something fetches ahead of the loop. So no step is known to end with its "
    "draw, and a sample could count twice in one. What waited has been dropped, and nothing was released. Call step() "
    "once for each part, one that is left out too (a backward pass of no samples, x[:0], leaves zeros), and let the "
    "loader's workers fetch ahead (Accelerate's loader does so, too: prepare() the engine's, and BatchMemoryManager "
    "around what that gives); then begin a new loop over it"
)
_SEVERAL_DRAWS = (
    "signal_skip_step() makes one step of {} Poisson draws: a sample may be in each, and moves the sum by C each "
    "time, and the accountant is told of one step. Parts of one draw may be a step; more samples a step are a larger "
    "batch_size of the loader, in parts by BatchMemoryManager. What waited has been dropped, and nothing was released"
)
_DROPPED = (
    "the last loop over BatchMemoryManager ended within a draw or before parts that it had fetched. What waited of "
    "that draw has been dropped, or a sample could count twice in one step; nothing of it was released or accounted for"
)


class _Part(NamedTuple):
    """What a signal is of: the loader that asked for it, its number there, and whether it is a draw of no samples."""

    loader: weakref.ref[Any]
    number: int
    is_empty: bool


class Signals(list[bool]):
    """Opacus's ``_step_skip_queue``, which begins anew with each iteration of a ``BatchSplittingSampler``.

    Who calls ``signal_skip_step()`` is looked at, once a part: a new iteration is another generator. Signals of one's
    own, from elsewhere, are taken as they come, as long as no other draw is fetched between those of one step.

    Args:
        optimizer: whose queue it is.

    Attributes:
        draws: of the loader that the engine gives, where these are counted.
    """

    draws: Draws | None = None

    def __init__(self, optimizer: Any):
        super().__init__()
        self._of: Any = weakref.ref(optimizer)  # in a cycle it would outlive its last user, and guard the model
        self._iteration: FrameType | None = None  # the frame itself: another one could get its id
        self._given_up: FrameType | None = None
        self._parts: list[_Part | None] = []  # of each signal; None: of one's own
        self._own: int | None = None  # draws that were taken when the last signal of one's own was to skip
        self._in_step = False  # whether the step before was for the part that its loop had been given last

    def append(self, skip: bool) -> None:
        """Raises StateError where two loops are mixed up, so that no step is known to end with its draw."""
        iteration, loader = _splits()
        if iteration is not None and iteration is not self._iteration:
            self._begin(iteration)
        elif iteration is None:
            self._of_one_draw(skip)
        self._parts.append(None if iteration is None or loader is None else _part(iteration, loader))
        super().append(skip)

    def _of_one_draw(self, skip: bool) -> None:
        """A part of a step: the next one's signal, or a step that has none and ends it."""
        if self.draws is None:
            return
        own, drawn = self._own, self.draws.drawn
        self._own = drawn if skip and own in (None, drawn) else None
        if own not in (None, drawn):
            self.give_up()
            raise StateError(_SEVERAL_DRAWS.format(drawn - own + 1))

    def __getitem__(self, place: Any) -> Any:
        """Raises StateError where that is not the signal of the part that the loop has been given last."""
        self._find_part()
        return super().__getitem__(place)

    def pop(self, place: SupportsIndex = -1) -> bool:
        """Raises StateError as :meth:`__getitem__`."""
        self._find_part()
        self._parts.pop(place)
        return super().pop(place)

    def clear(self) -> None:
        self._parts.clear()
        super().clear()

    def _find_part(self) -> None:
        """Puts the given part's signal in front. Draws of no samples may have been left out: nothing is lost. Other
        parts may not, and who fetches ahead of the loop looks as if it had left the first one out."""
        part = self._parts[0]
        loader = None if part is None else part.loader()
        if loader is None:  # there was none, or the loop is over
            return
        given = loader._num_yielded - 1
        while self._in_step and part is not None and part.is_empty and part.number < given and len(self) > 1:
            del self[0], self._parts[0]
            part = self._parts[0]
        waits = given if part is None else part.number
        self._in_step = waits == given
        if not self._in_step:
            self._given_up, self._iteration = self._iteration, None
            self.give_up()
            raise StateError(_LEFT_OUT.format(given=given, waits=waits))

    def give_up(self) -> None:
        """The step that has begun will not end: what it has taken is dropped."""
        self.clear()
        self._drop()

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Around one that takes gradients. Where it is interrupted before they have noise, it has taken none, nor have
        the steps that it goes on with: the next one would add its samples to theirs."""
        waited, private = len(self), self._of()
        private.takes = False
        if not waited:
            self._of_one_draw(False)
        try:
            yield
        except BaseException:
            if private.takes and wait_for_noise(private.params):
                if 0 < waited == len(self):
                    del self[0], self._parts[0]
                self._drop()
            raise

    def _drop(self) -> None:
        private = self._of()
        private._is_last_step_skipped = False  # so that zero_grad() drops what waits
        private.zero_grad(set_to_none=True)

    def _begin(self, iteration: FrameType) -> None:
        if self._in_step and all(part is not None and part.is_empty for part in self._parts):
            self.clear()  # draws of no samples that were left out
        before, self._iteration = self._iteration, iteration
        goes_on = iteration is self._given_up
        parts, private = len(self), self._of()
        within = goes_on or parts > 0 or private._is_last_step_skipped
        if not within and not wait_for_noise(private.params):
            return
        self._given_up = before
        self.give_up()
        if goes_on:
            raise StateError(_TWO_LOOPS)
        if parts and before is not None and before.f_locals.get("self") is iteration.f_locals["self"]:
            raise StateError(_FETCHED.format(parts))  # given up, or a loop that fetches ahead: nobody can tell
        if within:  # else a step was interrupted; or it is whole, and a rank that adds no noise marks no sums
            warn_caller(_DROPPED)


def _splits() -> tuple[FrameType | None, Any]:
    """The frame of the generator that splits draws into parts, where it is what asks, and the iterator of a loader that
    it is asked by."""
    frame: FrameType | None = sys._getframe(2)
    splits: FrameType | None = None
    while frame is not None:
        if splits is not None and isinstance(loader := frame.f_locals.get("self"), _BaseDataLoaderIter):
            return splits, loader
        if frame.f_code.co_flags & inspect.CO_GENERATOR and isinstance(
            frame.f_locals.get("self"), BatchSplittingSampler
        ):
            splits = frame
        frame = frame.f_back
    return splits, None


def _part(splits: FrameType, loader: Any) -> _Part:
    """That a loader asks for just now, in the order in which it will give them."""
    draw = splits.f_locals.get("batch_idxs")
    number = getattr(loader, "_send_idx", loader._num_yielded)
    return _Part(weakref.ref(loader), number, draw is not None and len(draw) == 0)
