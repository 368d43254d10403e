"""Lists whose entries are a sample each, or of all samples each: views, a trunk and a branch. No shape tells."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpfast.looks.called import Called, entries_of, leaves_but
from dpfast.looks.learned import Learned
from dpfast.taps import NO_BAGS, Tap, have_samples, leaves_of, results_in
from dpfast.trials import Path

_LISTS = (list, tuple, deque)


class Lists:
    """Of a model that is called with such.

    Attributes:
        are_samples: each tensor of the list that holds the first is a sample.
    """

    def __init__(self) -> None:
        self.are_samples = False

    def number(self, inputs: Any, leaves: Sequence[Any], n: int | None, dim: int) -> int | None:
        """Of samples, of which the first tensor has n in that dimension."""
        listed = _list_of_first(inputs, leaves, dim) if self.are_samples else None
        return n if listed is None else len(listed[1])

    def are_samples_now(
        self, receiver: Any, taps: Sequence[Tap], inputs: Any, found: Learned, known: set[Path]
    ) -> bool:
        """Whether they turn out to be: the model has them apart then, and does not run, or cannot, with each for rows
        of all samples. Where it does run so and mixes them, that counts.

        Args:
            found: with each for rows of all samples. known: where there have been entries; the list is added.
        """
        dim = receiver.batch_dim
        listed = None if self.are_samples or _parts_samples(found) else _list_of_first(inputs, leaves_of(inputs), dim)
        if listed is None or (found.told.why is None and _may_be_of_all(listed[1], dim)):
            return False
        path, n = listed[0], len(listed[1])
        entries = entries_of(receiver, inputs, n, {*known, path})
        leaves = leaves_but(entries, inputs)
        called = Called(inputs, leaves, NO_BAGS, NO_BAGS.dims(leaves, n), n, entries)
        self.are_samples = _parts_samples(called.learned(receiver, taps))
        known |= {path} if self.are_samples else set()
        return self.are_samples


def is_counted_by_entries(called: Called, dim: int) -> bool:
    """Whether no tensor says how many samples there are."""
    return not have_samples(called.leaves, dim)


def listed_alone(called: Called, dim: int) -> str | None:
    """In words a list that alone says how many samples there are, where its entries may be of all of them."""
    if not is_counted_by_entries(called, dim):
        return None
    given: Any = next((x.given for x in called.entries.values() if x is not None), None)
    return f"{type(given).__name__} of {len(given)}" if type(given) in _LISTS and _may_be_of_all(given, dim) else None


def _rows(x: Any, dim: int) -> int | None:
    if hasattr(x, "shape"):
        return x.shape[dim] if len(x.shape) > dim else None
    return len(x) if type(x) in _LISTS else None


def _list_of_first(inputs: Any, leaves: Sequence[Any], dim: int) -> tuple[Path, Sequence[Any]] | None:
    """The list that holds the first tensor with that dimension, and where it is; None: it is in none."""
    first = next((x for x in leaves if isinstance(x, Tensor) and x.dim() > dim), None)
    if first is None:  # which a list may hold too
        return None
    places = (((i, key), x) for i, some in enumerate(inputs) for key, x in (some.items() if i else enumerate(some)))
    lists = ((path, x) for path, x in places if type(x) in _LISTS)
    return next(((path, x) for path, x in lists if any(y is first for y in results_in(x))), None)


def _parts_samples(found: Learned) -> bool:
    """Whether it tells where they are, in what the model returns too, and that they do not meet."""
    return found.told.why is None and not found.told.is_wrong and bool(found.told.parted)


def _may_be_of_all(some: Sequence[Any], dim: int) -> bool:
    """Whether each entry has as many rows as the others: all samples may have theirs there."""
    lengths = [_rows(x, dim) for x in some]
    return bool(lengths) and len(set(lengths)) == 1 and (lengths[0] or 0) > 1
