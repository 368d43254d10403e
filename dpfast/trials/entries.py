"""What a model is called with, no tensor, that has an entry for each sample: lists of lengths, of texts, of boxes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpfast.taps import INERT, Structure, attributes_of, results_in

Path = tuple[Any, ...]
"""The numbers, keys and names by which one comes from a call's (args, kwargs) to what is in them."""

_DEPTH = 4
_SIZES = 4  # of a picture, or a window: no longer a tuple has these


class Entries:
    """One for each sample.

    Args:
        items: those. made: has of them what the model takes. kind: the name of that.
    """

    def __init__(self, items: Sequence[Any], made: Callable[[list[Any]], Any], kind: str):
        self._items, self._made, self.kind = list(items), made, kind

    def __len__(self) -> int:
        return len(self._items)

    def tensors(self) -> list[Tensor]:
        """In any of them."""
        return [x for x in results_in(self._items) if isinstance(x, Tensor)]

    def taken(self, numbers: Iterable[int]) -> Entries:
        """Those of these samples."""
        return Entries([self._items[i] for i in numbers], self._made, self.kind)

    def exchanged(self, numbers: Mapping[int, int]) -> Entries:
        """With others in the places of some: {place: whose}; where they agree, smaller ones where they are numbers."""
        items = list(self._items)
        for i, j in numbers.items():
            items[i] = _another(items[i]) if _are_equal(items[i], items[j]) else items[j]
        return Entries(items, self._made, self.kind)

    def as_given(self) -> Any:
        """As the model takes them; what it writes there is nobody else's."""
        return self._made([_copied(x) for x in self._items])


def entries_in(inputs: Any, dim: int, n: int, *, tensors: bool = True) -> dict[Path, Entries | None]:
    """What has an entry for each of n samples, by where it stands in (args, kwargs); None where no others can be put
    there (a set).

    Args:
        dim: of the samples, in tensors. tensors: whether entries may hold some.
    """
    found = dict(_found(enumerate(inputs), (), dim, n, _DEPTH)) if n > 1 else {}
    return {path: x for path, x in found.items() if tensors or x is None or not x.tensors()}


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


def _found(
    inside: Iterable[tuple[Any, Any]], path: Path, dim: int, n: int, depth: int
) -> Iterator[tuple[Path, Entries | None]]:
    for key, x in inside:
        here = (*path, key)
        if isinstance(x, (Tensor, nn.Module, PackedSequence, *INERT)) or not depth:
            continue
        if hasattr(x, "shape") and hasattr(x, "tolist"):
            if x.shape[:1] == (n,):
                yield here, _of_array(x)
        elif not isinstance(x, (Sequence, Set)):
            held = x if isinstance(x, Mapping) else attributes_of(x)
            fixed = isinstance(x, Mapping) and not isinstance(x, MutableMapping)
            yield from ((p, None if fixed else y) for p, y in _found(held.items(), here, dim, n, depth - 1))
        elif path and len(x) == n and not (_are_sizes(x) or _are_batches(x, dim, n)):
            yield here, Entries(list(x), type(x), type(x).__name__) if type(x) in (list, tuple, deque) else None
        else:
            fixed = not isinstance(x, (tuple, list, deque))
            yield from ((p, None if fixed else y) for p, y in _found(enumerate(x), here, dim, n, depth - 1))


def _of_array(x: Any) -> Entries | None:
    if type(x).__module__ != "numpy":  # pandas's, and others
        return None
    import numpy as np

    return Entries(list(x), lambda items: np.array(items, dtype=x.dtype), type(x).__name__)


def _are_sizes(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) <= _SIZES and all(isinstance(y, (int, float)) for y in x)


def _are_batches(x: Any, dim: int, n: int) -> bool:
    """Whether each is, or holds, tensors of all samples: a layer's keys and values."""
    tensors = [y for y in results_in(list(x)) if isinstance(y, Tensor)]
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
    try:
        return bool(x == y)
    except Exception:  # whatever an object of somebody's own raises
        return False


def _another(x: Any) -> Any:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return x
    return max(x - 1, 0) if isinstance(x, int) else 0.5 * x
