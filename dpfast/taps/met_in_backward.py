"""Where samples meet in backward passes alone, as gradients tell of runs in which samples were exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.taps.fingerprints import are_beyond_rounding, spread_of
from dpfast.taps.layout import Place, Rows
from dpfast.taps.seen import Key, Run
from dpfast.taps.witness import whose_rows

Grads = dict[Key, list[Tensor]]
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

    def spread(self, repeated: Run) -> float:
        """By which part of themselves gradients differ at most between equal runs."""
        both = [(self.base.grads, repeated.grads)]
        both += [(grads, repeated.losses.get(i, {})) for i, grads in self.base.losses.items()]
        pairs = [xy for one, two in both for key, x in one.items() for xy in zip(x, two.get(key, []), strict=False)]
        return max((spread_of(x, y) for x, y in pairs if x.dim() == 2 and x.shape == y.shape), default=0.0)

    def _met(self, base: Grads, runs: list[Grads], spread: float) -> list[Key]:
        met = []
        for key, grads in base.items():
            place = self.places.get(key)
            for number, rows in enumerate(grads) if isinstance(place, (int, Rows)) else ():
                whose = whose_rows(len(rows), self.size, place, rows.device)  # type: ignore[arg-type]  # as above
                others = [run.get(key, [])[number : number + 1] for run in runs]
                if whose is not None and any(
                    bool((_differ(other[0], rows, spread) & of_others(whose, some)).any())
                    for other, some in zip(others, self.which, strict=True)
                    if other and other[0].shape == rows.shape
                ):
                    met.append(key)
                    break
        return met


def _differ(rows: Tensor, others: Tensor, spread: float) -> Tensor:
    """Which do: fingerprints, or gradients as they are."""
    return rows != others if rows.dim() == 1 else are_beyond_rounding(others, rows, spread)


def of_others(whose: Tensor, some: tuple[int, ...]) -> Tensor:
    """Which rows are of none of these samples."""
    return torch.isin(whose, torch.tensor(some, device=whose.device), invert=True)
