"""How many calls of Python and of C something takes."""

import gc
import sys
from collections.abc import Callable


def calls_of(run: Callable[[], object]) -> int:
    """Of `run()`, without the collector: what it calls for others' objects that go (weakref callbacks) is not ours."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    before, enabled = sys.getprofile(), gc.isenabled()
    gc.disable()
    try:
        sys.setprofile(note)
        run()
    finally:
        sys.setprofile(before)
        if enabled:
            gc.enable()
    return count
