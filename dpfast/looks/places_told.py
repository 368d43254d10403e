"""What runs in which samples were exchanged tell of where a tap, and the model's outputs, have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.looks.met_in_backward import Which, of_others
from dpfast.looks.seen import Key, Run, added_up
from dpfast.taps import Mixed, OtherRows, Place, Rows

OTHER_ORDER = (
    "its samples stand in another order than in the model's input, and not by x[order] with an order that the inputs "
    "give, which is followed (pack_padded_sequence sorts by itself, and is followed, with enforce_sorted=False)"
)

_OTHER_ROWS = (
    "its output {} has {} rows a sample in dimension {}, where batches before had one; say so by layout, 'N*k' where "
    "they stand together"
)


def place_told(size: int, place: Place, base: Any, runs: list[Any], which: Which) -> Place:
    """The place that the runs tell of a tap, or what is wrong with it.

    Args:
        size: so many samples ran. place: as shapes tell it. base, runs: what the tap gave in each run, by calls.
    """
    fewest = min(len(calls or ()) for calls in (base, *runs))
    more = [x for calls in (base, *runs) for x in (calls or ())[fewest:]]  # turns of a loop; of what, others show
    if not fewest or any(not isinstance(x, Tensor) or len(x) != len(base[0]) for x in more):
        return "whether it runs depends on the data of the batch"
    found: Place = place
    for call, *others in zip(base, *runs, strict=False):
        if any(type(x) is not type(call) or (isinstance(x, Tensor) and x.shape != call.shape) for x in others):
            return "how many rows it has depends on the data of the batch"
        if not isinstance(call, Tensor):
            if isinstance(place, int) and place < len(call) and call[place] and call[place] % size == 0:
                return OtherRows(_OTHER_ROWS.format(call, call[place] // size, place))
            return f"its output {call} has no samples in dimension {place if isinstance(place, int) else 0}"
        told = _of_call(size, place, [x != call for x in others], which)
        if isinstance(told, str):
            return told
        if isinstance(found, Rows) and isinstance(told, Rows) and told.together is not None:
            if found.together not in (None, told.together):
                return "its samples are folded into rows in different orders at different uses"
            found = told
    return found


def calls_told(key: Key, runs: Sequence[Run]) -> list[list[Any] | None]:
    """What a tap gave in each run; of rows that were picked at their places among all, those of nobody where it did
    not run."""
    calls = [run.calls.get(key) for run in runs]
    if not any(key in run.at_places for run in runs):
        return calls
    all_calls = [x for some in calls for x in some or ()]
    if not all(isinstance(x, Tensor) and x.shape == all_calls[0].shape for x in all_calls):
        return calls
    return [added_up(some or []) or [torch.zeros_like(all_calls[0])] for some in calls]


def _of_call(size: int, place: Place, changed: list[Tensor], which: Which) -> Place:
    rows = torch.arange(len(changed[0]), device=changed[0].device)
    k = len(rows) // size
    orders = {True: rows // max(k, 1), False: rows % size}
    fits = [
        together
        for together, whose in orders.items()
        if not any(bool((c & of_others(whose, some)).any()) for c, some in zip(changed, which, strict=True))
    ]
    if fits:
        if not isinstance(place, Rows) or len(fits) == 2:
            return place
        return Rows(place.dim, fits[0])
    if bool((torch.stack(changed).sum(0) > 1).any()) or not isinstance(place, Rows):
        once = bool((torch.stack(changed).sum(0) <= 1).all())
        few = all(int(c.sum()) <= len(some) for c, some in zip(changed, which, strict=True))
        if not isinstance(place, Rows) and once and few:
            return OTHER_ORDER
        return Mixed("a row of its output changes with a sample that is not its own")
    return "its samples are folded into rows in an order that is neither sample by sample nor over and over"


def parted_told(i: int, base: Run, runs: list[Run], which: Which) -> list[int] | None:
    """The dimensions of an output of the model, as long as the batch, in which its entries are the samples' own;
    None where that cannot be told."""
    if not base.outputs[i] or any(len(run.outputs) != len(base.outputs) for run in runs):
        return None
    dims = []
    for d, prints in base.outputs[i].items():
        others = [run.outputs[i][d] for run in runs if d in run.outputs[i]]
        if len(others) < len(runs):
            return None
        number = torch.arange(len(prints), device=prints.device)
        if not any(
            bool(((x != prints) & of_others(number, some)).any()) for x, some in zip(others, which, strict=True)
        ):
            dims.append(d)
    return dims
