"""Which steps are to be skipped, as ``BatchMemoryManager`` says; and the draw of a loop over it that was given up.

Opacus says "skip this step" when a part is fetched, not when it is used, and keeps it in a queue. Where a loop ends
early (Ctrl-C, out of memory, ``break``) parts of a draw wait in ``p.summed_grad``, and the queue has signals of parts
that nobody will use, with workers those of many. The next loop would add another draw to the first, and one sample
could count twice in what gets the noise of one; and its steps would end where no draw does.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from types import FrameType
from typing import Any

from opacus.utils.batch_memory_manager import BatchSplittingSampler

from dpfast.errors import DpfastWarning, StateError
from dpfast.modes import wait_for_noise

_FETCHED = (
    "{} parts of draws were fetched through BatchMemoryManager and not stepped on, and its loader is gone through once "
    "more: which step is to be skipped is not known. What waited has been dropped, and nothing was released. Where the "
    "loop was given up, start it again, and enter BatchMemoryManager anew; fetch no part ahead over the end of its "
    "loader, and look at other batches than its own in between"
)
_TWO_LOOPS = (
    "a loop over BatchMemoryManager goes on after another one with the same optimizer began, which has dropped what "
    "this one had fetched: which step is to be skipped is not known. Nothing was released; evaluate on batches that do "
    "not come through this optimizer's BatchMemoryManager"
)
_DROPPED = (
    "the last loop over BatchMemoryManager ended within a draw or before parts that it had fetched. What waited of "
    "that draw has been dropped, or a sample could count twice in one step; nothing of it was released or accounted for"
)


class Signals(list[bool]):
    """Opacus's ``_step_skip_queue``, which begins anew with each iteration of a ``BatchSplittingSampler``.

    Who calls ``signal_skip_step()`` is looked at, once a part: a new iteration is another generator. Signals of one's
    own, from elsewhere, are taken as they come.

    Args:
        optimizer: whose queue it is.
    """

    def __init__(self, optimizer: Any):
        super().__init__()
        self._of: Any = weakref.ref(optimizer)  # in a cycle it would outlive its last user, and guard the model
        self._iteration: FrameType | None = None  # the frame itself: another one could get its id
        self._given_up: FrameType | None = None

    def append(self, skip: bool) -> None:
        """Raises StateError where two loops are mixed up, so that no step is known to end with its draw."""
        iteration = _splits()
        if iteration is not None and iteration is not self._iteration:
            self._begin(iteration)
        super().append(skip)

    def give_up(self) -> None:
        """The step that has begun will not end: what it has taken is dropped."""
        self.clear()
        self._of()._is_last_step_skipped = False  # so that zero_grad() drops what waits
        self._of().zero_grad(set_to_none=True)

    def _begin(self, iteration: FrameType) -> None:
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
            warnings.warn(_DROPPED, DpfastWarning, stacklevel=4)


def _splits() -> FrameType | None:
    """The frame of the generator that splits draws into parts, where it is what asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR and isinstance(
            frame.f_locals.get("self"), BatchSplittingSampler
        ):
            return frame
        frame = frame.f_back
    return None
