"""Kinds of input: a model that is called with another may go another way, so each is looked at for itself."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from dpfast.trials import Entries, Path

_SMALL = 16  # whole numbers below it may be of branches; of counters there are soon too many to look at each

_SIZES = 3  # dimensions that a window has; longer tuples of whole numbers, and lists, are samples' own, mostly


def kind_of(inputs: Any, leaves: Sequence[Any], trainable: bytes, modes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of what a model is called with.

    Sizes and numbers do not count: batches and sequences of another length are of the same kind. Which parameters are
    trainable does: a frozen one stands in operations as any tensor, and no gradient of it is followed there.

    Args:
        inputs: (args, kwargs). leaves: what is in them. trainable: which of the model's parameters are. modes: of its
            modules, as of :meth:`Switches.modes`.
    """
    kind: tuple[Any, ...] = (trainable, *modes, *_autocasts(), *inputs[1])
    kind += tuple(_modes_named((*inputs[0], *inputs[1].values())))
    return kind + tuple(map(_kind_of_leaf, leaves))


def kinds_of_entries(entries: Mapping[Path, Entries | None]) -> Iterator[Any]:
    """Where they are, and which kinds there are among all of them: not how many, or whose, or each batch of another
    size would be of another kind."""
    for path, x in entries.items():
        yield path if x is None or x.given is None else (path, frozenset(map(_kind_of_leaf, x.leaves())))


def _kind_of_leaf(x: Any) -> Any:
    return x.dim() if isinstance(x, Tensor) else x is True or type(x)


def _autocasts() -> tuple[bool, bool]:
    """On which devices autocast is on: a forward may go its way by it, and makes other nodes."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _modes_named(arguments: Sequence[Any]) -> Iterator[Any]:
    """By which a forward may go its ways: texts that are arguments, small whole numbers, weights of nothing or all, in
    dicts these and the keys, and the numbers of a window or a picture's size."""
    for x in arguments:
        if (named := mode_named(x)) is not None:
            yield named
        elif isinstance(x, Mapping):
            yield from x
            yield from _modes_named(tuple(x.values()))
        elif isinstance(x, tuple) and len(x) <= _SIZES and all(isinstance(y, Integral) for y in x):
            yield from _modes_named(x)


def mode_named(x: Any) -> tuple[Any, Any] | None:
    """One of these by itself; None: it names none."""
    number = (isinstance(x, Integral) and abs(int(x)) < _SMALL) or (isinstance(x, float) and x in (0, 1))
    return (type(x), x) if number or isinstance(x, (str, enum.Enum)) else None


def alike_by_accident(leaves: Sequence[Any], dims: Sequence[Set[int]]) -> tuple[Any, ...]:
    """The shapes, numbers and names, where an input is as long as the batch in another dimension too: a forward that
    goes by these may go another way then, and nobody would see it."""
    if all(len(some) < 2 for some in dims):
        return ()
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x if isinstance(x, (int, str)) else None for x in leaves)
