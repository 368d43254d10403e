"""What a backward pass has left in ``p.grad``: a note on the gradient itself, which goes when the gradient goes.

Whoever adds noise must know how many passes a gradient holds (the accountant counts them) and how much one sample
may have moved it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpfast.distributed import local
from dpfast.errors import StateError

_NAME = "_dpfast_left"
_SHARING: Any = WeakIdKeyDictionary()
"""By parameter: a weak reference to the optimizer that shares its noise with other ranks."""


@dataclass(frozen=True)
class Left:
    """``passes`` backward passes whose clipped sums a gradient holds, and the largest ``sensitivity`` of them;
    ``of_rank``: of this rank's samples alone, where there are other ranks to add (``no_sync``). ``ranks``: how many the
    sum is over; 0: the pass knew of no other ranks."""

    passes: int
    sensitivity: float
    of_rank: bool = False
    ranks: int = 0


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
        if p.grad is not None:
            note(p.grad, left)


def note(gradient: Tensor, left: Left) -> None:
    """On one."""
    gradient.__dict__[_NAME] = left, gradient._version


def _noted(parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Left, int]]:
    """Gradients with a note, the note, and the version that the gradient had then."""
    grads = (p.grad for p in parameters)
    return [(grad, *vars(grad)[_NAME]) for grad in grads if grad is not None and _NAME in vars(grad)]


def check_ranks(before: Left, ranks: int, *, crosses: bool) -> None:
    """Raises StateError where a sum over ``ranks`` ranks cannot be added to what was left ``before``; ``crosses``:
    whether it has crossed them."""
    if max(before.ranks, ranks) > 1 and before.ranks != ranks:
        raise StateError(
            f"p.grad holds a sum over {before.ranks or 1} ranks, and this backward pass leaves one over {ranks or 1}: "
            "the model was called through its DistributedDataParallel once and past it once; step and zero_grad() "
            "between them"
        )
    if ranks and not crosses and not before.of_rank:
        raise StateError(
            "p.grad holds the sum of all ranks, and this backward pass, under no_sync(), that of one; step and "
            "zero_grad() between them"
        )


def shares_noise(parameters: Iterable[nn.Parameter], optimizer: Any) -> None:
    """That optimizer adds the same noise to them on all ranks, which must mean the same by it: ``must_agree()``."""
    for p in parameters:
        _SHARING[p] = weakref.ref(optimizer)


def noise_of(parameters: Iterable[nn.Parameter]) -> list[object]:
    """What the optimizers of :func:`shares_noise` must have alike on all ranks."""
    if not _SHARING:
        return []
    optimizers = dict.fromkeys(_SHARING[p]() for p in parameters if p in _SHARING)
    return [optimizer.must_agree() for optimizer in optimizers if optimizer is not None]
