"""What a model is called with, no tensor, that has an entry for each sample: lists of lengths, of texts, of boxes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpfast.taps import INERT, Structure, attributes_of, results_in
from dpfast.trials.another import another

Path = tuple[Any, ...]
"""The numbers, keys and names by which one comes from a call's (args, kwargs) to what is in them."""

_DEPTH = 6
_FEW = 4  # as many numbers as a picture or a window has, or other settings: may not be of samples


class Entries:
    """One for each sample.

    Args:
        items: those. made: has of them what the model takes. kind: the name of that. given: as the model has them.
    """

    def __init__(self, items: Sequence[Any], made: Callable[[list[Any]], Any], kind: str, given: Any = None):
        self._items, self._made, self.kind, self.given = list(items), made, kind, given

    def __len__(self) -> int:
        return len(self._items)

    def leaves(self) -> list[Any]:
        """What is in any of them."""
        return results_in(self._items)

    def taken(self, numbers: Iterable[int]) -> Entries:
        """Those of these samples."""
        return Entries([self._items[i] for i in numbers], self._made, self.kind)

    def exchanged(self, numbers: Mapping[int, int]) -> Entries:
        """With others in the places of some: {place: whose}; where they agree, smaller ones where they are numbers."""
        items = list(self._items)
        for i, j in numbers.items():
            items[i] = another(items[i], i % 2 == 1) if _are_equal(items[i], items[j]) else items[j]
        return Entries(items, self._made, self.kind)

    def as_given(self) -> Any:
        """As the model takes them; what it writes there is nobody else's."""
        return self._made([_copied(x) for x in self._items])


def entries_in(inputs: Any, dim: int, n: int, known: Set[Path] = frozenset()) -> dict[Path, Entries | None]:
    """What has an entry for each of n samples, or seems to, by where it stands in (args, kwargs); None where no others
    can be put there (a set), or it may be something else (the two sizes of a picture).

    Args:
        dim: of the samples, in tensors. known: where entries have been: there, tensors that have as many rows as there
            are of them are no batches.
    """
    args, kwargs = inputs
    if not n or all(isinstance(x, (Tensor, *INERT)) for x in (*args, *kwargs.values())):  # nearly always
        return {}
    return dict(_found(enumerate(inputs), (), dim, n, _DEPTH, known))


def number_of_entries(inputs: Any, dim: int) -> int | None:
    """How many the first in (args, kwargs) has that may have one for each sample; None: nothing there may, in whose
    places others can be put.

    Args:
        dim: of the samples, in arrays.
    """
    args, kwargs = inputs
    return next(_numbers((*args, *kwargs.values()), dim, _DEPTH), None)


def given_whole(entries: Mapping[Path, Entries | None]) -> frozenset[int]:
    """The ids of what has them: however many there are, and of whatever kinds, each time is like the others."""
    return frozenset(id(x.given) for x in entries.values() if x is not None and x.given is not None)


def not_followed(entries: Mapping[Path, Entries | None], dims: Sequence[int | None]) -> list[str]:
    """What kinds of them have had no others in their places.

    Args:
        dims: of those where others can be put, the dimension of the samples if the model ran so.
    """
    told = iter(dims)
    kinds = [("collection", None) if x is None else (x.kind, next(told, None)) for x in entries.values()]
    return [kind for kind, dim in kinds if dim is None]


def put_in(inputs: Any, path: Path, x: Any) -> Any:
    """The same with that in its place."""
    if not path:
        return x
    key, *rest = path
    if isinstance(inputs, tuple):
        parts = (*inputs[:key], put_in(inputs[key], tuple(rest), x), *inputs[key + 1 :])
        return type(inputs)._make(parts) if hasattr(inputs, "_make") else parts  # of names
    if isinstance(inputs, (MutableMapping, list, deque)):
        inputs[key] = put_in(inputs[key], tuple(rest), x)  # as taken apart, it is a copy
    else:
        object.__setattr__(inputs, key, put_in(getattr(inputs, key), tuple(rest), x))  # of frozen ones too
    return inputs


def _numbers(inside: Iterable[Any], dim: int, depth: int) -> Iterator[int]:
    for x in inside:
        if isinstance(x, (Tensor, nn.Module, PackedSequence, *INERT)) or not depth:
            continue
        if hasattr(x, "shape") and hasattr(x, "tolist"):
            yield from x.shape[dim : dim + 1] if type(x).__module__ == "numpy" else ()
        elif type(x) in (list, tuple, deque):
            yield from () if _are_settings(x) else (len(x),)
        else:
            held, fixed = _held(x)
            yield from () if fixed else _numbers((y for _, y in held), dim, depth - 1)


def _found(
    inside: Iterable[tuple[Any, Any]], path: Path, dim: int, n: int, depth: int, known: Set[Path]
) -> Iterator[tuple[Path, Entries | None]]:
    for key, x in inside:
        here = (*path, key)
        if isinstance(x, (Tensor, nn.Module, PackedSequence, *INERT)) or not depth:
            continue
        if hasattr(x, "shape") and hasattr(x, "tolist"):
            of = dim if len(x.shape) > dim else 0
            if x.shape[of : of + 1] == (n,):
                yield here, _of_array(x, of)
            elif n > 1 and n in x.shape:
                yield here, None
        elif path and isinstance(x, (Sequence, Set)) and _is_of_samples(x, dim, n, here in known):
            yield here, Entries(list(x), type(x), type(x).__name__, x) if type(x) in (list, tuple, deque) else None
        else:
            held, fixed = _held(x)
            more = dict(_found(held, here, dim, n, depth - 1, known))
            if here not in _CALL and not more and _may_be_of_samples(x, n) and not _are_batches(x, dim, n):
                yield here, None
            yield from ((p, None if fixed else y) for p, y in more.items())


_CALL: tuple[Path, ...] = ((0,), (1,))
"""Where the call's own (args, kwargs) are."""


def _held(x: Any) -> tuple[Iterable[tuple[Any, Any]], bool]:
    """What is in it, by number, key or name; and whether it cannot be written there."""
    if isinstance(x, (Sequence, Set)):
        return enumerate(x), not isinstance(x, (tuple, list, deque))
    if isinstance(x, Mapping):
        return x.items(), not isinstance(x, MutableMapping)
    return attributes_of(x).items(), False


def _is_of_samples(x: Any, dim: int, n: int, known: bool) -> bool:
    return len(x) == n and not _are_settings(x) and (known or not _are_batches(x, dim, n))


def _are_settings(x: Sequence[Any] | Set[Any]) -> bool:
    return isinstance(x, tuple) and 0 < len(x) <= _FEW and all(isinstance(y, (str, Real)) for y in x)


def _may_be_of_samples(x: Any, n: int) -> bool:
    """Whether it has as many as there are samples, by name or key (or settings), or in a tuple (a picture's sizes); or
    several for each."""
    if n < 2 or not isinstance(x, (Sequence, Set, Mapping)):
        return False
    return len(x) == n or (n > _FEW and len(x) > n and len(x) % n == 0 and not isinstance(x, Mapping))


def _of_array(x: Any, dim: int) -> Entries | None:
    if type(x).__module__ != "numpy":  # pandas's, and others
        return None
    import numpy as np

    def made(items: list[Any]) -> Any:
        array = np.empty((len(items), *x.shape[:dim], *x.shape[dim + 1 :]), dtype=x.dtype)
        for i, item in enumerate(items):  # which may be arrays of several shapes
            array[i] = item
        return np.moveaxis(array, 0, dim)

    return Entries(list(np.moveaxis(x, dim, 0)), made, type(x).__name__, x)


def _are_batches(x: Any, dim: int, n: int) -> bool:
    """Whether each is, or holds, tensors of all samples: a layer's keys and values."""
    inside = list(x.values()) if isinstance(x, Mapping) else list(x)
    tensors = [y for y in results_in(inside) if isinstance(y, Tensor)]
    return bool(tensors) and all(y.dim() > dim and y.shape[dim] == n for y in tensors)


def _copied(x: Any) -> Any:
    structure = Structure(x)
    return structure.unflatten([y.detach().clone() if isinstance(y, Tensor) else y for y in structure.leaves])


def _are_equal(one: Any, two: Any) -> bool:
    some, others = Structure(one).leaves, Structure(two).leaves
    if len(some) != len(others):
        return False
    return all(_is(x, y) for x, y in zip(some, others, strict=True))


def _is(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y)
    if getattr(x, "shape", None) != getattr(y, "shape", None):
        return False
    try:
        same = x == y
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    except Exception:  # whatever an object of somebody's own raises
        return False
