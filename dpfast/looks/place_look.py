"""Whether a sample's gradient changes with its place in the batch (a table of positions along the batch, a first row
that is treated otherwise) or with how many samples there are: one sample fewer changes all behind it then, or all,
which no clipping bounds.

The same samples run in another order, and then as they were in the same batch: twice as many, which must give the
parameters together twice as much but for roundings. Where it is not so, it must be so in fp64 too, if the model runs in
that: an ill-conditioned layer makes much of roundings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.looks.own_gradients import FAR, Outputs, Runs, differ, gradients_of
from dpfast.taps import Tap
from dpfast.trials import Trial, same_random_numbers, stand_ins, taken

_IN_DOUBLE = 2.0**-20

MOVED = (
    "a sample's gradient in it changes with the sample's place in the batch (a table of positions along the batch "
    "instead of time, pe[:x.size(0)] where samples come first; a row that is treated otherwise): without one sample "
    "all others stand elsewhere"
)
COUNTED = (
    "a sample's gradient in it changes with how many samples there are (what is divided by their number; a size read "
    "of the batch's dimension instead of another's): without one sample all others' change. Where it is a mean, return "
    "the samples' losses, and take their mean outside of the model"
)


def moved_by_place(
    model: nn.Module, taps: Sequence[Tap], trial: Trial, dims: Sequence[int | None], sizes: Sequence[int]
) -> dict[int | str, str]:
    """Of the model's outputs, by number, and of what it keeps, by name, why a loss made of one has no gradients by
    sample.

    Args:
        trial: the inputs. dims: of each, that of its samples. sizes: so many run, or where they do not, so many.
    """
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return {}  # parts of parameters, as in ``exchange``
    for size, times in (*((size, 2) for size in dict.fromkeys(sizes)), (sizes[-1], 1)):
        for others in (stand_ins(model), {}):
            try:
                with same_random_numbers() as again, torch.enable_grad():
                    runs = Runs(model, taps, trial, again, others)
                    return _moved(runs, trial.leaves, dims, size, times)
            except Exception:  # whatever a model raises that wants its samples in their order
                pass
    return {}


def _moved(
    runs: Runs, leaves: Sequence[Any], dims: Sequence[int | None], size: int, times: int
) -> dict[int | str, str]:
    def run(order: Sequence[int], runs: Runs = runs) -> Outputs:
        return runs.run([taken(x, d, order) for x, d in zip(leaves, dims, strict=True)])

    order, other = [*range(size)], [size - 1, *range(size - 1)]
    all_of_them = [*other, *order[1:], 0][: times * size]  # another one is the first, and the last
    one, more = (_together(run(some), len(some)) for some in (order, all_of_them))  # one graph at a time
    if not _differ_together(one, more, times):
        return {}
    first = run(order)
    found = _differing(first, run(all_of_them), size, times)
    if not found or _differing(first, run(order), size):  # or random numbers that cannot be put back
        return {}
    runs.again.draw()  # numbers that are drawn for each sample are other ones in each place
    if _differing(first, run(order), size):
        return {}
    try:
        exact, least = runs.in_double(), _IN_DOUBLE
        first, second = run(order, exact), run(all_of_them, exact)
        if _differing(first, run(order, exact), size, least=least):
            return {}
    except Exception:  # whatever a model raises whose own code says fp32
        exact, least = runs, FAR
        first, second = run(order), run(all_of_them)
    found &= _differing(first, second, size, times, least)
    by_place = _differing(first, run(other, exact), size, least=least)
    return {key: MOVED if key in by_place else COUNTED for key in found}


class _Together(NamedTuple):
    """What all outputs give: those with rows of so many samples, and losses (one number, or one a sample), which may be
    the parts of a mean."""

    rows: list[Tensor]
    losses: list[Tensor]
    finest: torch.dtype


def _together(outputs: Outputs, size: int) -> _Together:
    found = outputs.found.values()
    losses = [x for x in found if _are_losses(x, size)]
    rows = [x for x in found if not _are_losses(x, size)]
    of_rows = gradients_of(rows, outputs, [False] * len(rows), again=bool(losses)) if rows else []
    of_losses = gradients_of(losses, outputs, [True] * len(losses), again=False) if losses else []
    return _Together(of_rows, of_losses, min((x.dtype for x in found), key=lambda dtype: torch.finfo(dtype).eps))


def _are_losses(x: Tensor, size: int) -> bool:
    return size not in x.shape or x.numel() == size


def _differ_together(one: _Together, more: _Together, times: int) -> bool:
    return any(
        bool(x) != bool(y) or (bool(x) and _are_unlike([x, y], factors, one.finest))
        for x, y, factors in ((one.rows, more.rows, {times}), (one.losses, more.losses, {times, 1}))
    )


def _differing(one: Outputs, two: Outputs, size: int, times: int = 1, least: float | None = None) -> set[int | str]:
    """The outputs of which the samples of the first run, so many, give something else than in the second one, where
    each of them is there so many times."""
    found = set()
    for key, x in one.found.items():
        y = two.found.get(key)
        if y is None or not _are_rows_of(x, y, size, times):
            continue
        losses = _are_losses(x, size) or (times > 1 and y.shape == x.shape)
        grads = [gradients_of([z], run, [losses]) for z, run in ((x, one), (y, two))]
        if _are_unlike(grads, {times, 1} if losses else {times}, x.dtype, least):
            found.add(key)
    return found


def _are_rows_of(x: Tensor, y: Tensor, size: int, times: int) -> bool:
    """Others have as many as these samples make in that order."""
    if x.dim() != y.dim():
        return False
    return all(m in (n, times * n if n == size else n) for m, n in zip(y.shape, x.shape, strict=True))


def _are_unlike(
    grads: Sequence[list[Tensor]], factors: Collection[int], dtype: torch.dtype, least: float | None = None
) -> bool:
    """Whether the second gradients are the first ones times none of these."""
    return all(differ(grads, (k, -1.0), dtype, least) for k in factors)
