"""Whether a sample's gradient changes with its place in the batch (a table of positions along the batch, a first row
that is treated otherwise) or with how many samples there are: one sample fewer changes all behind it then, or all,
which no clipping bounds.

Two samples run together and each alone, and what they give the parameters must be the same but for roundings. Where it
is not so, it must be so in fp64 too, if the model runs in that: an ill-conditioned layer makes much of roundings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpfast.looks.own_gradients import FAR, Outputs, Runs, differ, gradients_of
from dpfast.looks.told import Told
from dpfast.taps import Tap, begun_anew
from dpfast.trials import Trial, same_random_numbers, stand_ins, taken

_IN_DOUBLE = 2.0**-20

MOVED = (
    "a sample's gradient in it changes with the sample's place in the batch (a table of positions along the batch "
    "instead of time, pe[:x.size(0)] where samples come first; a row that is treated otherwise): without one sample "
    "all others stand elsewhere"
)
COUNTED = (
    "a sample's gradient in it changes with how many samples there are (what is divided by their number, or a mean "
    "beside a sum; a size read of the batch's dimension instead of another's): without one sample all others' change. "
    "Where it is a mean, return the samples' losses, and take their mean outside of the model"
)


@begun_anew
def with_places(
    told: Told,
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    dims: Sequence[int | None],
    sizes: Sequence[int],
    refused: Mapping[int | str, str] = MappingProxyType({}),
) -> Told:
    """What is told, with the outputs, by number, and what the model keeps, by name, of which a loss has no gradients by
    sample because of this; not asked where samples meet in a layer.

    Args:
        trial: the inputs. dims: of each, that of its samples. sizes: so many run, or where they do not, so many.
        refused: what is known of outputs, which are not asked about, like those of which something is told.
    """
    if told.why is not None or any(isinstance(place, str) for place in told.places.values()):
        return told
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return told  # parts of parameters, as in ``exchange``
    known = {*told.outputs, *refused}
    for size, alone in ((sizes[0], True), *((size, False) for size in dict.fromkeys(sizes))):
        for others in (stand_ins(model), {}):
            try:
                with same_random_numbers() as again, torch.enable_grad():
                    look = _Look(Runs(model, taps, trial, again, others), dims, known, size, alone)
                    return told._replace(outputs={**look.wrong(), **told.outputs})
            except Exception:  # whatever a model raises that wants its samples in their order, or several
                pass
    return told


class _Look:
    """At so many samples: in another order, and at two each ``alone``, or not."""

    def __init__(self, runs: Runs, dims: Sequence[int | None], known: Collection[int | str], size: int, alone: bool):
        self.runs, self.dims, self.known, self.size = runs, dims, known, size
        self.order, self.other = [*range(size)], [size - 1, *range(size - 1)]
        self.alone = [[i] for i in self.order] if alone else []

    def wrong(self) -> dict[int | str, str]:
        if not self._differ_together():
            return {}
        found, first = self._differing(self.runs), self._run(self.order)
        self.runs.again.draw()  # numbers that are drawn for each sample are other ones in each place
        if not found or self._moved(first, self._run(self.order)):
            return {}
        try:
            exact = self._differing(self.runs.in_double(), _IN_DOUBLE)
        except Exception:  # whatever a model raises whose own code says fp32
            exact = self._differing(self.runs, FAR)
        return {key: why for key, why in exact.items() if key in found}

    def _run(self, order: Sequence[int], runs: Runs | None = None) -> Outputs:
        runs = runs or self.runs
        outputs = runs.run([taken(x, d, order) for x, d in zip(runs.trial.leaves, self.dims, strict=True)])
        return outputs._replace(found={key: x for key, x in outputs.found.items() if key not in self.known})

    def _differ_together(self) -> bool:
        """One run goes, and its graph with it, before the next one begins."""
        runs = [_together(self._run(some), len(some)) for some in (self.order, *(self.alone or [self.other]))]
        parts = [-1.0] * (len(runs) - 1)
        for kind, factors in (("rows", {1}), ("losses", {1, len(parts)})):
            grads = [some for run in runs if (some := getattr(run, kind))]
            if grads and (len(grads) < len(runs) or _are_unlike(grads, [(k, *parts) for k in factors], runs[0].finest)):
                return True
        return False

    def _differing(self, runs: Runs, least: float | None = None) -> dict[int | str, str]:
        """Nothing where two runs on the same differ."""
        first = self._run(self.order, runs)
        if self._moved(first, self._run(self.order, runs), least):
            return {}
        moved = self._moved(first, self._run(self.other, runs), least)
        counted = self._counted(first, runs, least) if self.alone else []
        return dict.fromkeys(counted, COUNTED) | dict.fromkeys(moved, MOVED)

    def _moved(self, one: Outputs, other: Outputs, least: float | None = None) -> list[int | str]:
        # Others have as many rows as these samples make in that order.
        alike = [(key, x) for key, x in one.found.items() if key in other.found and other.found[key].shape == x.shape]
        signs = [(1.0, -1.0)]
        return [key for key, x in alike if _of_output(key, [one, other], self.size not in x.shape, signs, least)]

    def _counted(self, both: Outputs, runs: Runs, least: float | None) -> list[int | str]:
        one, two = (self._run(some, runs) for some in self.alone)
        twice, found = self._run([*self.alone[0] * 2], runs), list[int | str]()
        for key, x in both.found.items():
            if not all(key in run.found for run in (one, two, twice)):
                continue
            shape, losses = one.found[key].shape, x.numel() == self.size
            if shape == x.shape:  # a sum or a mean, and what has no samples, a penalty, goes out
                wrong = _of_output(key, [one, two, twice, both], True, [(1, -1, -k, k) for k in (1, 2)], least)
            elif _are_of_one(shape, x.shape, self.size):
                factors = (1, 2) if losses else (1,)  # they may be parts of a mean
                wrong = _of_output(key, [both, one, two], losses, [(k, -1, -1) for k in factors], least)
            else:
                wrong = False
            found += [key] if wrong else []
        return found


class _Together(NamedTuple):
    """What all outputs give: those with rows of so many samples, and losses (one number, or one a sample)."""

    rows: list[Tensor]
    losses: list[Tensor]
    finest: torch.dtype


def _together(outputs: Outputs, size: int) -> _Together:
    found = outputs.found.values()
    losses = [x for x in found if size not in x.shape or x.numel() == size]
    rows = [x for x in found if size in x.shape and x.numel() != size]
    of_rows = gradients_of(rows, outputs, [False] * len(rows), again=bool(losses)) if rows else []
    of_losses = gradients_of(losses, outputs, [True] * len(losses), again=False) if losses else []
    kinds = sorted((x.dtype for x in found), key=lambda dtype: torch.finfo(dtype).eps)
    return _Together(of_rows, of_losses, kinds[0] if kinds else torch.float32)


def _are_of_one(shape: torch.Size, of_all: torch.Size, size: int) -> bool:
    """Whether one sample's has this shape where so many have that; there may be as many classes as samples."""
    return len(shape) == len(of_all) and all(
        m in (n, 1 if n == size else n) for m, n in zip(shape, of_all, strict=True)
    )


def _of_output(
    key: int | str, runs: Sequence[Outputs], losses: bool, signs: Sequence[Sequence[float]], least: float | None
) -> bool:
    """Whether what it gives in these runs adds up to something, in whichever way."""
    grads = [gradients_of([run.found[key]], run, [losses]) for run in runs]
    return _are_unlike(grads, signs, runs[0].found[key].dtype, least)


def _are_unlike(
    grads: Sequence[list[Tensor]], signs: Sequence[Sequence[float]], dtype: torch.dtype, least: float | None = None
) -> bool:
    return all(differ(grads, some, dtype, least) for some in signs)
