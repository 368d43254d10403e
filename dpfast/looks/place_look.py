"""Whether a sample's gradient changes with its place in the batch: a table of positions along the batch, a first row
that is treated otherwise. One sample fewer moves all behind it then, which no clipping bounds.

The same samples run in another order, and what they give the parameters together must be the same but for roundings.
Where it is not, it must be so in fp64 too, if the model runs in that: an ill-conditioned layer makes much of roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.looks.own_gradients import FAR, Outputs, Runs, differ, gradients_of
from dpfast.taps import Tap
from dpfast.trials import Trial, same_random_numbers, stand_ins, taken

_SIGNS = (1.0, -1.0)
_IN_DOUBLE = 2.0**-20

MOVED = (
    "a sample's gradient in it changes with the sample's place in the batch (a table of positions along the batch "
    "instead of time, pe[:x.size(0)] where samples come first; a row that is treated otherwise): without one sample "
    "all others stand elsewhere"
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
    for size in dict.fromkeys(sizes):
        for others in (stand_ins(model), {}):
            try:
                with same_random_numbers() as again, torch.enable_grad():
                    runs = Runs(model, taps, trial, again, others)
                    return dict.fromkeys(_moved(runs, trial.leaves, dims, size), MOVED)
            except Exception:  # whatever a model raises that wants its samples in their order
                pass
    return {}


def _moved(runs: Runs, leaves: Sequence[Any], dims: Sequence[int | None], size: int) -> list[int | str]:
    def run(order: Sequence[int], runs: Runs = runs) -> Outputs:
        return runs.run([taken(x, d, order) for x, d in zip(leaves, dims, strict=True)])

    def together(order: Sequence[int]) -> tuple[list[Tensor], torch.dtype]:
        outputs = run(order)  # which goes before the next one runs, and its graph with it
        finest = min((x.dtype for x in outputs.found.values()), key=lambda dtype: torch.finfo(dtype).eps)
        return _gradients(outputs, list(outputs.found), size, again=False), finest

    def differing(one: Outputs, two: Outputs, least: float | None = None) -> list[int | str]:
        # Others have as many rows as these samples make in that order.
        keys = [key for key, x in one.found.items() if key in two.found and two.found[key].shape == x.shape]
        grads = ([_gradients(outputs, [key], size) for outputs in (one, two)] for key in keys)
        return [key for key, some in zip(keys, grads, strict=True) if differ(some, _SIGNS, one.found[key].dtype, least)]

    order, other = range(size), [size - 1, *range(size - 1)]
    (one, dtype), (two, _) = together(order), together(other)
    if not differ([one, two], _SIGNS, dtype):
        return []
    first = run(order)
    found = differing(first, run(other))
    if not found or differing(first, run(order)):  # or random numbers that cannot be put back
        return []
    runs.again.draw()  # numbers that are drawn for each sample are other ones in each place
    if differing(first, run(order)):
        return []
    try:
        exact = runs.in_double()
        first, second = run(order, exact), run(other, exact)
        unsteady = differing(first, run(order, exact), _IN_DOUBLE)
    except Exception:  # whatever a model raises whose own code says fp32
        return [key for key in found if key in differing(first, run(other), FAR)]
    return [key for key in found if not unsteady and key in differing(first, second, _IN_DOUBLE)]


def _gradients(outputs: Outputs, keys: Sequence[int | str], size: int, *, again: bool = True) -> list[Tensor]:
    some = [outputs.found[key] for key in keys]
    return gradients_of(some, outputs, [size not in x.shape for x in some], again=again)
