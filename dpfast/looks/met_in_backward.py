"""Where samples meet in backward passes alone, as gradients tell of runs in which samples were exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.errors import UnsupportedModuleError
from dpfast.looks.fingerprints import are_beyond_rounding, spread_of
from dpfast.looks.seen import Beside, CaughtOf, Grads, Key, OfRows, Run, added_up
from dpfast.looks.witness import whose_rows
from dpfast.taps import Place, Rows

Which = list[tuple[int, ...]]
"""The samples that are exchanged in each run."""


class Exchanged(NamedTuple):
    """Runs with samples exchanged, and one without.

    Attributes:
        places: of taps. size: how many samples there are.
    """

    base: Run
    runs: Sequence[Run]
    which: Which
    places: Mapping[Key, Place]
    size: int

    def met(self, spread: float = 0.0) -> list[Key]:
        """Taps at whose outputs gradients change with a sample that is not theirs.

        Args:
            spread: what is no more than this part of a row comes of no sample (:meth:`spread`).
        """
        return self._met(self.base.grads, [run.grads for run in self.runs], spread)

    def meet_in_loss(self, i: int, spread: float = 0.0) -> bool:
        """Whether samples meet in an output of the model that is one number."""
        return bool(self._met(self.base.losses[i], [run.losses.get(i, {}) for run in self.runs], spread))

    def orders(self, mixing: Container[int]) -> dict[Key, Place]:
        """Of taps with folded rows that are the same for all samples (positions), whose order the forward pass does not
        tell: where a row's gradient changes with a sample, the row is that one's.

        Args:
            mixing: outputs without samples that tell nothing, because samples meet in them.
        """
        found: dict[Key, Place] = {}
        for key, place in self.places.items():
            if not (isinstance(place, Rows) and place.together is None):
                continue
            fits = [
                order for order in (Rows(place.dim, True), Rows(place.dim, False)) if self._may_be(key, order, mixing)
            ]
            if len(fits) == 1:
                found[key] = fits[0]
        return found

    def _may_be(self, key: Key, place: Rows, mixing: Container[int]) -> bool:
        passes = [(self.base.grads, [run.grads for run in self.runs])]
        losses = {i: grads for i, grads in self.base.losses.items() if i not in mixing}
        passes += [(grads, [run.losses.get(i, {}) for run in self.runs]) for i, grads in losses.items()]
        return not any(
            self._meet_at(place, grads := base.get(key, []), _of_runs(runs, key, grads), 0.0) for base, runs in passes
        )

    def spread(self, repeated: Run) -> float:
        """By which part of themselves gradients differ at most between equal runs."""
        both = [(self.base.grads, repeated.grads)]
        both += [(grads, repeated.losses.get(i, {})) for i, grads in self.base.losses.items()]
        pairs = [xy for one, two in both for key, x in one.items() for xy in zip(x, two.get(key, []), strict=False)]
        return max((spread_of(x, y) for x, y in pairs if x.dim() == 2 and x.shape == y.shape), default=0.0)

    def _met(self, base: Grads, runs: list[Grads], spread: float) -> list[Key]:
        met: list[Key] = []
        apart: dict[tuple[Key, int], bool] = {}  # of outputs beside the first, whether they are in some dimension
        for key, grads in base.items():
            others = _of_runs(runs, key, grads)
            if isinstance(key, Beside):
                places = self._places(key)
                if places:
                    part = any(not self._meet_at(place, grads, others, spread) for place in places)
                    apart[key[:2]] = part or apart.get(key[:2], False)
            elif isinstance(key, OfRows):
                if self._meet_among_picked(key, grads, others, spread):
                    met.append(key.of)
            else:
                place, several = self.places.get(key), [(grads, others)]
                if any(key in run.at_places for run in (self.base, *self.runs)):
                    shapes = {x.shape for some in (grads, *others) for x in some}
                    several = [(added_up(grads, s), [added_up(other, s) for other in others]) for s in shapes]
                if isinstance(place, (int, Rows)) and any(self._meet_at(place, *some, spread) for some in several):
                    met.append(key)
        return met + [key for (key, _), part in apart.items() if not part and key not in met]

    def _meet_among_picked(self, key: OfRows, grads: list[Tensor], others: list[list[Tensor]], spread: float) -> bool:
        """Whether gradients of rows that were picked do, which are those of all of a layer's calls."""
        whose = self._whose_picked(key)
        if whose is None:
            return False
        rows, changed = added_up(grads), []
        for other in map(added_up, others):
            if rows and other:
                same = other[0].shape == rows[0].shape
                changed.append(_differ(rows[0], other[0], spread) if same else None)
            else:
                changed.append(next((x.reshape(len(x), -1).ne(0).any(1) for x in (*rows, *other)), None))
        return any(
            some is not None and bool((some.cpu() & of_others(whose, which)).any())
            for some, which in zip(changed, self.which, strict=True)
        )

    def _whose_picked(self, key: OfRows) -> Tensor | None:
        """The samples of the rows that there are to pick; None where that is not known."""
        found: list[Tensor] = []
        for run in (self.base, *self.runs):
            for source in run.sources.get(key, ()):
                if isinstance(source.place, Rows) and source.place.together is None:
                    return None
                try:
                    found.append(source.samples(self.size))
                except UnsupportedModuleError:
                    return None
        return found[0] if found and all(torch.equal(x, found[0]) for x in found[1:]) else None

    def _places(self, beside: Beside) -> list[int | Rows]:
        """Where such an output may have its samples, along one dimension: as exchanged ones change it there, and no
        other row; none where none changes it."""
        base = self.base.beside[beside]
        found = [run.beside.get(beside) for run in self.runs]
        if any(x is None or x.shape != base.shape for x in found):
            return []
        changed = [x.ne(base) for x in found if x is not None]
        if not any(bool(x.any()) for x in changed):
            return []
        folded = (Rows(beside.dim, True), Rows(beside.dim, False))
        places: Sequence[int | Rows] = (beside.dim,) if len(base) == self.size else folded
        return [place for place in places if not self._any_of_others(place, changed)]

    def _meet_at(self, place: int | Rows, grads: list[Tensor], others: list[list[Tensor]], spread: float) -> bool:
        """Whether any of these gradients, one for each use, changes with a sample that is not its row's; none has come
        to what was not used."""
        for some in itertools.zip_longest(grads, *others):
            like = next((x for x in some if x is not None and x.numel()), None)
            if like is None:
                continue
            rows, *found = [x if x is not None and x.numel() else torch.zeros_like(like) for x in some]
            changed = [None if x.shape != rows.shape else _differ(x, rows, spread) for x in found]
            if self._any_of_others(place, changed):
                return True
        return False

    def _any_of_others(self, place: int | Rows, changed: Sequence[Tensor | None]) -> bool:
        """Whether rows have changed that are of no exchanged sample. changed: in each run; None: not known."""
        for rows, some in zip(changed, self.which, strict=True):
            if rows is None or not bool(rows.any()):
                continue
            whose = whose_rows(len(rows), self.size, place, rows.device)
            if whose is not None and bool((rows & of_others(whose, some)).any()):
                return True
        return False


def _of_runs(runs: Sequence[Grads], key: CaughtOf, grads: list[Tensor]) -> list[list[Tensor]]:
    """A tap's in each run; those of the first (``grads``) of one without a backward pass, which tells nothing."""
    return [run.get(key, []) if run else grads for run in runs]


def _differ(rows: Tensor, others: Tensor, spread: float) -> Tensor:
    """Which do: fingerprints, or gradients as they are."""
    return rows != others if rows.dim() == 1 else are_beyond_rounding(others, rows, spread)


def of_others(whose: Tensor, some: tuple[int, ...]) -> Tensor:
    """Which rows are of none of these samples."""
    return torch.isin(whose, torch.tensor(some, device=whose.device), invert=True)
