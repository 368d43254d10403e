"""How long samples are that a model is called with as entries of a list: of a text nobody but its tokenizer knows. A
copy of the model runs with each of them in all places, and what its layers take and give shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from dpfast.looks.run_on import run_on
from dpfast.taps import Tap
from dpfast.trials import Entries, Trial, taken

_MOST = 4  # ways to be long; experts have a way each


def lengths_of_each(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    leaves: Sequence[Any],
    dims: Sequence[int | None],
    size: int,
    others: dict[int, Any],
    again: Callable[[], None],
) -> list[list[int]]:
    """Of so many samples, by sample: sizes of what layers take and give, and how often they run, where it differs; of
    those with the same samples for the longest one, of a few that most layers have. None where no entries follow the
    batch, or where the model takes no such batches.

    Args:
        leaves, trial: the inputs. dims: of each, that of its samples. others: what stands where parameters are.
        again: has random numbers start again.
    """
    if not any(isinstance(x, Entries) and dim is not None for x, dim in zip(leaves, dims, strict=True)):
        return []
    found = []
    for number in range(size):
        some = [taken(x, d, [number] * size) for x, d in zip(leaves, dims, strict=True)]
        again()
        try:
            _, witnesses = run_on(model, taps, trial, some, {}, size, others)
        except Exception:  # whatever a model raises that wants others
            return []
        calls = [call for witness in witnesses for _, call in witness.took_and_gave]
        times = [len(witness.took_and_gave) for witness in witnesses]
        found.append([*times, *(length for call in calls for some in call for shape in some for length in shape)])
    by_longest: dict[tuple[int, ...], list[list[int]]] = {}
    for lengths in map(list, zip_longest(*found, fillvalue=0)):
        if min(lengths) < max(lengths):
            by_longest.setdefault(tuple(j for j, x in enumerate(lengths) if x == max(lengths)), []).append(lengths)
    return [some[0] for some in sorted(by_longest.values(), key=len, reverse=True)[:_MOST]]
