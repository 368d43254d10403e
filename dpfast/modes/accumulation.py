"""What a backward pass has left in ``p.grad``: a note on the gradient itself, which goes when the gradient goes.

Whoever adds noise must know how many passes a gradient holds (the accountant counts them) and how much one sample
may have moved it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfast.distributed import local

_NAME = "_dpfast_left"
_STEPS = "_dpfast_noised_steps"


@dataclass(frozen=True)
class Left:
    """``passes`` backward passes whose clipped sums a gradient holds, and the largest ``sensitivity`` of them;
    ``of_rank``: of this rank's samples alone, where there are other ranks to add (``no_sync``). ``ranks``: how many the
    sum is over."""

    passes: int
    sensitivity: float
    of_rank: bool = False
    ranks: int = 1


def held_by(parameters: Iterable[nn.Parameter]) -> Left | None:
    """What the notes on the gradients say; None where there is none.

    A gradient keeps its note when something writes to it, as a Trainer does that measures or clips the norm of the
    sum. (Clipping the sum is a projection, which no sample's part can grow by.)
    """
    notes = [left for _, left, _ in _noted(parameters)]
    if not notes:
        return None
    return Left(
        max(note.passes for note in notes),
        max(note.sensitivity for note in notes),
        of_rank=any(note.of_rank for note in notes),
        ranks=max(note.ranks for note in notes),
    )


def left_in(parameters: Iterable[nn.Parameter]) -> Left | None:
    """:func:`held_by`, or None where the gradients have been set to zero since."""
    parameters = list(parameters)
    noted = _noted(parameters)
    if all(grad._version != version for grad, _, version in noted):
        nonzero = [local(grad).any() for grad, _, _ in noted]  # asked only where something has written to all of them
        if not nonzero or not torch.stack([x.to(nonzero[0].device) for x in nonzero]).any():
            return None
    return held_by(parameters)


def leave(parameters: Iterable[nn.Parameter], left: Left) -> None:
    """Notes on every gradient what it holds."""
    for p in parameters:
        grad = p.grad
        if grad is not None:
            setattr(grad, _NAME, (left, grad._version))


def _noted(parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Left, int]]:
    """Gradients with a note, the note, and the version that the gradient had then."""
    grads = (p.grad for p in parameters)
    return [(grad, *vars(grad)[_NAME]) for grad in grads if grad is not None and _NAME in vars(grad)]


def count_noised(parameters: Iterable[nn.Parameter], steps: int) -> None:
    """An optimizer that shares its noise with other ranks has added it so many times; ranks must be at the same."""
    for p in parameters:
        setattr(p, _STEPS, steps)


def noised(parameters: Iterable[nn.Parameter]) -> int:
    """What :func:`count_noised` has counted."""
    return max((getattr(p, _STEPS, 0) for p in parameters), default=0)
