"""What a backward pass has left in ``p.grad``: a note on the gradient itself, which goes when the gradient goes.

Whoever adds noise must know how many passes a gradient holds (the accountant counts them) and how much one sample
may have moved it. The note is valid as long as nobody has written to the gradient since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

_NAME = "_dpfast_left"


@dataclass(frozen=True)
class Left:
    """``passes`` backward passes whose clipped sums a gradient holds, and the largest ``sensitivity`` of them."""

    passes: int
    sensitivity: float
    version: int = -1


def left_in(parameters: Iterable[nn.Parameter]) -> Left | None:
    """What the gradients hold that no optimizer has taken and no zero_grad has cleared; None where that is nothing."""
    notes = [note for p in parameters if p.grad is not None and (note := _note(p.grad)) is not None]
    if not notes:
        return None
    return Left(max(note.passes for note in notes), max(note.sensitivity for note in notes))


def leave(parameters: Iterable[nn.Parameter], left: Left) -> None:
    """Notes on every gradient what it holds."""
    for p in parameters:
        if p.grad is not None:
            setattr(p.grad, _NAME, Left(left.passes, left.sensitivity, p.grad._version))


def _note(grad: object) -> Left | None:
    note = getattr(grad, _NAME, None)
    return note if note is not None and note.version == grad._version else None
