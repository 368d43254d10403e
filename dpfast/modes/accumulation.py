"""What a backward pass has left in ``p.grad``: a note on the gradient itself, which goes when the gradient goes. And
what it may add to the ``p.grad_sample`` of earlier ones.

Whoever adds noise must know how many passes a gradient holds (the accountant counts them) and how much one sample
may have moved it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpfast.distributed import local
from dpfast.errors import StateError
from dpfast.taps import in_backward

_NAME, _ZEROS = "_dpfast_left", "_dpfast_zeros"
_SHARING: Any = WeakIdKeyDictionary()
"""By parameter: a weak reference to the optimizer that shares its noise with other ranks."""

_NUMBERS: Any = WeakIdKeyDictionary()
"""By wrapped module: its number."""

_count = itertools.count()


@dataclass(frozen=True)
class Left:
    """``passes`` backward passes whose clipped sums a gradient holds, and the largest ``sensitivity`` of them;
    ``of_rank``: of this rank's samples alone, where there are other ranks to add (``no_sync``). ``ranks``: how many the
    sum is over; 0: the pass knew of no other ranks. ``backward``: the last of the passes. ``unclipped``: ordinary
    gradients are among them, or in their place. ``modules``: those that have clipped, each by itself, by number.
    ``unwatched``: taps have gone since, so that whatever is written to the gradient may be an ordinary one."""

    passes: int
    sensitivity: float
    of_rank: bool = False
    ranks: int = 0
    backward: int | None = field(default_factory=in_backward)
    unclipped: bool = False
    modules: frozenset[int] = frozenset()
    unwatched: bool = False


_ORDINARY = Left(0, 0.0, backward=None, unclipped=True)


def nothing_left(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether none has a gradient, as nearly always where a step begins; no line of Python for each."""
    return {*map(type, map(_grad, parameters))} <= {type(None)}


_grad = attrgetter("grad")


def numbered(module: nn.Module) -> frozenset[int]:
    """The module's number, the same however often it is wrapped."""
    number = _NUMBERS.get(module)
    if number is None:
        number = _NUMBERS[module] = frozenset((next(_count),))
    return number


def held_by(parameters: Iterable[nn.Parameter]) -> Left | None:
    """What the notes on the gradients say; None where there is none.

    A gradient keeps its note when something writes to it, as a Trainer does that measures or clips the norm of the
    sum. (Clipping the sum is a projection, which no sample's part can grow by.)
    """
    notes: list[Left] = []
    for _, left in _notes(parameters):
        if not notes or left is not notes[-1]:  # a pass leaves one on all of them
            notes.append(left)
    return together(notes)


def together(notes: Iterable[Left]) -> Left | None:
    """What they say of all gradients that they stand on; None where there is none."""
    notes = list({id(left): left for left in notes}.values())
    if not notes:
        return None
    return Left(
        max(note.passes for note in notes),
        max(note.sensitivity for note in notes),
        of_rank=any(note.of_rank for note in notes),
        ranks=max(note.ranks for note in notes),
        backward=max((note.backward for note in notes if note.backward is not None), default=None),
        unclipped=any(note.unclipped for note in notes),
        modules=frozenset().union(*(note.modules for note in notes)),
    )


def notes_on(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Left]:
    """What stands on each gradient that has a note."""
    return dict(_notes(parameters))


def _notes(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Left]]:
    found: list[Any] = []
    for p in parameters:  # several times a step, so no function is called for each
        gradient = p.grad
        if gradient is not None and (noted := vars(gradient).get(_NAME)) is not None:
            found.append((p, note_on(gradient) if noted[0].unwatched else noted[0]))
    return found


def note_on(gradient: Tensor) -> Left | None:
    """What stands on one."""
    left: Left | None
    left, version = vars(gradient).get(_NAME, (None, 0))
    if left is not None and left.unwatched and gradient._version != version:
        return replace(left, unclipped=True)
    return left


def not_noted(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose gradient has no note, and is not zeros of some ``zero_grad()``. (Of DTensors each rank has a part,
    and all ranks are to find the same.)"""
    found = _without_note(parameters)
    others = set(_not_zeros([p for p in found if type(p.grad) is Tensor]))
    return [p for p in found if type(p.grad) is not Tensor or p in others]


def not_noted_here(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """:func:`not_noted`, where of DTensors this rank's part alone is looked at, and without what has been released:
    backward passes of a generator go through its critic then, and no step takes what they add before zero_grad()."""
    return _not_zeros([p for p in _without_note(parameters) if not _is_released(getattr(p, "summed_grad", None))])


def _without_note(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    found = []
    for p in parameters:
        gradient = p.grad
        if gradient is not None:
            notes = vars(gradient)
            if _NAME not in notes and notes.get(_ZEROS) != gradient._version:
                found.append(p)
    return found


def _not_zeros(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """A device is asked once for all of them, and not at all where there are none."""
    found = [local(p.grad).any() for p in parameters]
    some = torch.stack([x.to(found[0].device) for x in found]).tolist() if found else []
    return list(itertools.compress(parameters, some))


def left_in(parameters: Iterable[nn.Parameter]) -> Left | None:
    """:func:`held_by`, or None where the gradients have been set to zero since."""
    parameters = list(parameters)
    noted = _noted(parameters)
    if all(grad._version != version for grad, _, version in noted):
        nonzero = [local(grad).any() for grad, _, _ in noted]  # asked only where something has written to all of them
        if not nonzero or not torch.stack([x.to(nonzero[0].device) for x in nonzero]).any():
            return None
    return held_by(parameters)


def leave(parameters: Iterable[nn.Parameter], left: Left, passes: Mapping[nn.Parameter, int] | None = None) -> None:
    """Notes on every gradient what it holds.

    Args:
        passes: those that were in each before this one, where they may differ: who steps a part of the parameters gives
            up what that part holds.
    """
    for p in parameters:
        if p.grad is not None:
            one_more = left.passes if passes is None else passes.get(p, 0) + 1
            note(p.grad, left if one_more == left.passes else replace(left, passes=one_more))


def passes_in(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """How many backward passes' sums each gradient holds, where it holds some and has not been set to zero."""
    found = {}
    for p in parameters:
        left, version = vars(p.grad).get(_NAME, (None, 0)) if p.grad is not None else (None, 0)
        if left is not None and (p.grad._version == version or local(p.grad).any()):  # type: ignore[union-attr]
            found[p] = left.passes
    return found


def note(gradient: Tensor, left: Left) -> None:
    """On one."""
    gradient.__dict__[_NAME] = left, gradient._version


def note_alike(gradients: Iterable[Tensor], left: Left) -> None:
    """On several, the same."""
    for gradient in gradients:
        gradient.__dict__[_NAME] = left, gradient._version


def note_zeros(parameters: Iterable[nn.Parameter]) -> None:
    """On gradients that an optimizer has just set to zero, so that nobody has to look at them."""
    for p in parameters:
        if p.grad is not None:
            vars(p.grad)[_ZEROS] = p.grad._version


def note_ordinary(gradient: Tensor) -> None:
    """Notes that an ordinary gradient is a part of it."""
    before = vars(gradient).get(_NAME)
    note(gradient, _ORDINARY if before is None else replace(before[0], unclipped=True))


def note_unwatched(parameters: Iterable[nn.Parameter]) -> None:
    """Notes on what has been left in them that taps have gone."""
    for gradient, left, _ in _noted(parameters):
        note(gradient, replace(left, unwatched=True))


def _noted(parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Left, int]]:
    """Gradients with a note, the note, and the version that the gradient had then."""
    grads = (p.grad for p in parameters)
    return [(grad, *vars(grad)[_NAME]) for grad in grads if grad is not None and _NAME in vars(grad)]


def wait_for_noise(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer has taken sums of theirs in a virtual step, which goes on (Opacus's ``summed_grad``)."""
    sums = (getattr(p, "summed_grad", None) for p in parameters)
    return any(x is not None and not _is_released(x) for x in sums)


def _is_released(summed_grad: Any) -> bool:
    """Opacus's mark, which its optimizers refuse to step on."""
    return bool(getattr(summed_grad, "_processed", False))


def check_same_parameters(named: Iterable[tuple[str, nn.Parameter]], used: Collection[nn.Parameter]) -> None:
    """Raises StateError where ``grad_sample`` of earlier passes is still there and they used other parameters than this
    one: the rows in one place would be of different samples, and whoever clips them would take these for one. What is
    frozen by now loses its own, should it be trained again before somebody clips."""
    held, others = False, []
    for name, p in named:
        holds = getattr(p, "grad_sample", None) is not None
        if holds and used and not p.requires_grad:
            p.grad_sample = None  # type: ignore[attr-defined]  # as in Opacus
        elif p.requires_grad:
            held = held or holds
            others += [name] if holds != (p in used) else []
    if held and used and others:
        raise StateError(
            "this backward pass and the earlier ones, whose grad_sample is still there, do not use the same parameters "
            f"({others[0]} is used in some alone), so rows of one sample would not stand in one place: clip, or "
            "zero_grad(), after each pass (the model's: an optimizer clears its own parameters alone, and what it does "
            "not train is better frozen); add up the losses of one batch before backward(); or take "
            "GradSampleModuleFastGradientClipping, which clips each pass by itself and gives unused parameters zeros"
        )


def check_alone(before: Left) -> None:
    """Raises StateError where what was left ``before`` is of the very backward pass that runs."""
    if before.backward is not None and before.backward == in_backward():
        raise StateError(
            "one backward pass goes through two wrapped models that share a parameter, and each clips by itself: a "
            "sample could move p.grad by twice as much; wrap one module that holds both, or take a backward pass, and "
            "other samples, for each"
        )


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
