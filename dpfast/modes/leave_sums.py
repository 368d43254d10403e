"""The end of a step: clipped sums go to ``p.grad``, and on every gradient stands what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.distributed import local, placed, told_to_all
from dpfast.errors import StateError
from dpfast.modes.accumulation import (
    Left,
    check_alone,
    check_ranks,
    leave,
    left_in,
    noise_of,
    not_noted_here,
    note,
    note_alike,
    note_on,
    notes_on,
    nothing_left,
    numbered,
    passes_in,
    together,
    wait_for_noise,
)
from dpfast.modes.clippers import NormClipper
from dpfast.modes.gathered import Gathered
from dpfast.modes.rounding import Unrounded, kept_beside, warn_of_16_bits
from dpfast.modes.steps import Step

NOT_CLIPPED = (
    "holds what no private backward pass has left, and clipped sums would be added to it: zero_grad() first. Who "
    "changes a clipped sum between two passes writes into p.grad (p.grad.mul_(...)) and does not replace it; gradients "
    "of public data are added after step()"
)
"""What is wrong with a gradient."""


class Found(NamedTuple):
    """What was in ``p.grad`` when a backward pass of several ranks began; by its end DDP may have put other tensors
    there.

    Attributes:
        left: what the notes say of all gradients. notes: those of each. others: gradients that no note tells of.
        unrounded: what they were before they were rounded.
    """

    left: Left | None = None
    notes: dict[nn.Parameter, Left] = {}  # noqa: RUF012  # never written to
    others: dict[nn.Parameter, Tensor] = {}  # noqa: RUF012
    unrounded: Unrounded = Unrounded()  # never written to


class LeavesSums(nn.Module):
    """The part of a mode that leaves the sums."""

    _module: nn.Module
    _places: dict[nn.Parameter, int]
    _over_ranks: Any  # a Sums, where ranks have other samples
    _parts: Any  # a TensorParallel, where they have other parameters
    _found = Found()  # where there are other ranks
    _of_what: tuple[object, ...]
    _keys: Sequence[str] = ()  # of the batch that the model was last called with
    _clipper: Callable[[], NormClipper]
    check_accumulation: Callable[[], None]

    def _leave_sums(self, total: Callable[[nn.Parameter], Tensor | None]) -> None:
        """``p.grad += Σ_n c_n g_n`` for every trainable parameter, over the samples of all ranks where there are some.

        Args:
            total: the sum over this rank's samples, None where the step has not used the parameter; asked once.
        """
        warn_of_16_bits(self._module, self._places)
        if self._is_alone and nothing_left(self._places):
            self._leave_alone(total)
            return
        ranks = self._over_ranks
        self._follow_moved()
        with told_to_all(ranks, self._places):
            self._check_nothing_else()
        before = self._left_before()
        notes = {} if ranks is None else self._found.notes
        passes = None
        if before is not None:
            passes = passes_in(self._places) if ranks is None else {p: left.passes for p, left in notes.items()}
        unrounded, kept = Unrounded(), Unrounded.of(self._places) if ranks is None else self._found.unrounded
        if ranks is None or not ranks.crosses:
            # All of them first, so that none is half done; rounded where nothing is added: they may be as large again.
            alone = self._is_alone
            totals = {
                p: _rounded(p, total(p), unrounded) if alone and p.grad is None else total(p) for p in self._places
            }
            held = ranks is not None and ranks.hold(totals)
            for p, own in () if held else totals.items():
                if own is not None:
                    p.grad = placed(p, unrounded.settled(p, kept.get(p, local(p.grad)), own))
                elif p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
            self._note(before, passes, of_rank=ranks is not None, ranks=self._number_of_ranks())
            unrounded.keep()
            return
        uncrossed = {p for p, left in notes.items() if left.of_rank}  # their sums cross with those of this pass
        others = [p for p in self._places if p.grad is not None and p not in uncrossed]
        of_all = {p: kept[p] if p in kept else local(p.grad).clone() for p in others}

        def of_rank(p: nn.Parameter) -> Tensor | None:
            held = ranks.held(p) if p in uncrossed else None
            held = kept.get(p, held) if held is p.grad else held
            some = [x for x in (held, total(p)) if x is not None]
            return some[0] + some[1] if len(some) == 2 else some[0] if some else None

        def settled() -> None:
            self._note(before, passes, ranks=self._number_of_ranks())
            unrounded.keep()

        ranks.reduce(
            list(self._places),
            of_rank,
            lambda p, over_ranks: unrounded.settled(p, of_all.get(p), over_ranks),
            settled,
            *self._settings(before),
        )

    def _leave_alone(self, total: Callable[[nn.Parameter], Tensor | None]) -> None:
        """:meth:`_leave_sums` where no ranks are and no parameter has a gradient: there is nothing to look at."""
        unrounded = Unrounded()
        totals = {p: _rounded(p, total(p), unrounded) for p in self._places}
        left: list[Tensor] = []
        for p, own in totals.items():
            if own is None and p.requires_grad:
                own = torch.zeros_like(p)
            if own is not None:
                p.grad = own
                left.append(own)
        note_alike(left, self._with_one_more(Left(0, 0.0)))
        unrounded.keep()

    @property
    def _is_alone(self) -> bool:
        """Whether no other ranks have samples or parts of the sums."""
        return self._over_ranks is None and self._parts is None

    def _sum_parts(
        self, step: Step, gathered: Mapping[nn.Parameter, Gathered], fault: str | None = None
    ) -> tuple[object, ...]:
        """Sums over ranks take the place of what each of them has a part of. Returns what they must have alike.

        Args:
            fault: what is wrong with this rank's pass.

        Raises:
            StateError: on all ranks, where some disagree or one has a fault, which is what it says there.
        """
        with told_to_all(None if step.first is not None else self._over_ranks, self._places):
            settings = self._settings(self._noted())
            if self._parts is not None:
                factors = {p: entry.factors for p, entry in gathered.items()}
                again = step.second is not None
                self._parts.sum_parts(factors, step.num_samples or 0, *settings, again=again, fault=fault)
            elif fault is not None:
                raise StateError(fault)
        return settings

    def _settings(self, before: Left | None) -> tuple[object, ...]:
        """What all ranks must have alike."""
        passes: Any = 0 if before is None else before.passes
        if passes and self._over_ranks is not None:
            lefts = map(self._found.notes.get, self._places)
            of_each = [None if left is None else (left.passes, left.of_rank) for left in lefts]
            passes = of_each if len(set(of_each)) > 1 else of_each[:1]
        sensitivity = 0.0 if before is None else before.sensitivity  # under no_sync() nobody compares
        return *self._clipper().must_agree(), *self._of_what, self._keys, passes, sensitivity, noise_of(self._places)

    def _left_before(self) -> Left | None:
        """What earlier passes have left in ``p.grad``, to which another sum may be added."""
        before = self._noted()
        if before is not None and before.passes:
            check_alone(before)
            self.check_accumulation()
            crosses = self._parts is not None or (self._over_ranks is not None and self._over_ranks.crosses)
            lefts = [before] if self._over_ranks is None else dict.fromkeys(self._found.notes.values())
            for left in lefts:  # parameters that were frozen for some passes have others than the rest
                if left.passes:
                    check_ranks(left, self._number_of_ranks(), crosses=crosses)
        return before

    def _find(self) -> None:
        """What earlier passes have left, where there are other ranks."""
        left = left_in(self._places)
        notes = {} if left is None else notes_on(self._places)
        others = {p: _gradient(p) for p in not_noted_here(self._places)}
        self._found = Found(left, notes, others, Unrounded.of(self._places))

    def _follow_moved(self) -> None:
        """DDP makes its buckets anew once, and what was in ``p.grad`` goes on in views of these: they have the notes of
        the gradients that they were made of."""
        if self._over_ranks is None:
            return
        left, notes, others, unrounded = self._found
        stood = self._over_ranks.put_anew(others)
        moved = {p: note for p, before in stood.items() if (note := note_on(before)) is not None}
        if moved:
            left = together([*moved.values(), *([] if left is None else [left])])
            kept = {p: total for p in moved if (total := kept_beside(stood[p])) is not None}
            others = {p: others[p] for p in others.keys() - moved.keys()}
            self._found = Found(left, notes | moved, others, Unrounded(unrounded | kept))

    def _check_nothing_else(self) -> None:
        """Raises StateError where a gradient is there that no private pass has left."""
        others = [*self._found.others] if self._over_ranks is not None else not_noted_here(self._places)
        if others:
            name = next((name for name, p in self._module.named_parameters() if p is others[0]), "?")
            raise StateError(
                f"p.grad of {len(others)} of the {len(self._places)} parameters, one {name} {tuple(others[0].shape)}, "
                f"{NOT_CLIPPED}"
            )

    def has_left(self) -> bool:
        """Whether clipped sums of earlier backward passes are still there."""
        before = left_in(self._places)
        if (
            before is not None
            and before.passes
            and any(p.grad is not None and local(p.grad).any() for p in self._places)
        ):
            return True
        return wait_for_noise(self._places)

    def _noted(self) -> Left | None:
        return left_in(self._places) if self._over_ranks is None else self._found.left

    def _number_of_ranks(self) -> int:
        """That a step is taken by together; 0 where it knows of no others."""
        together = [ranks.number for ranks in (self._over_ranks, self._parts) if ranks is not None]
        return math.prod(together) if together else 0

    def _note(self, before: Left | None, passes: Mapping[nn.Parameter, int] | None = None, **of: Any) -> None:
        """One sum more is in ``p.grad``; ``passes``: see ``leave``."""
        leave(self._places, self._with_one_more(Left(0, 0.0) if before is None else before, **of), passes)
        self._found = Found()

    def _with_one_more(self, before: Left, **of: Any) -> Left:
        """What a gradient holds that held ``before``, once this pass has left its sum."""
        sensitivity, modules = self._clipper().take_sensitivity(), numbered(self._module)
        return Left(
            before.passes + 1,
            max(before.sensitivity, sensitivity),
            unclipped=before.unclipped,
            modules=before.modules | modules,
            **of,
        )

    def _note_again(self) -> None:
        """The first of two passes has left the sums as they were, and DDP may have written them anew: on a rank where
        they are zeros so far, they would look as if somebody had given them up."""
        for p, left in self._found.notes.items():
            if p.grad is not None:
                note(p.grad, left)
        self._found.unrounded.keep()


def _rounded(p: nn.Parameter, total: Tensor | None, unrounded: Unrounded) -> Tensor | None:
    """The sum in the parameter's dtype, where it is all that its gradient will be."""
    return total if total is None or total.dtype is p.dtype else unrounded.settled(p, None, total)


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad
