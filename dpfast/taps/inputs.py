"""The tensors in what a model is called with, whatever holds them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

WITHOUT_TENSORS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_DEPTH = 3


def leaves_of(inputs: Any) -> list[Any]:
    """What is in lists, dicts, packed sequences excepted, and in objects that hold tensors (dataclasses, batches)."""
    leaves = tree_leaves(inputs, is_leaf=_is_packed)
    if all(isinstance(x, (Tensor, *WITHOUT_TENSORS)) for x in leaves):
        return leaves
    return Structure(inputs).leaves


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors among a pytree's leaves, found sooner where it is of tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return [] if isinstance(x, WITHOUT_TENSORS) else [y for y in tree_leaves(x) if isinstance(y, Tensor)]
    found: list[Tensor] = []
    for y in x:
        if isinstance(y, Tensor):
            found.append(y)
        elif not isinstance(y, WITHOUT_TENSORS):
            found += tensors_in(y)
    return found


def keys_of(args: Any, kwargs: Any) -> tuple[str, ...]:
    """By what names a call's inputs come, of arguments and of what is in dicts; None is not there."""
    given = [kwargs, *(x for x in args if isinstance(x, Mapping))]
    return tuple(sorted({str(key) for some in given for key, x in some.items() if x is not None}))


class Structure:
    """Inputs taken apart.

    Attributes:
        leaves: as :func:`leaves_of` gives them.
    """

    def __init__(self, inputs: Any, depth: int = _DEPTH):
        flat, self._spec = tree_flatten(inputs, is_leaf=_is_packed)
        self._parts: list[tuple[Any, Structure | None]] = []
        self.leaves: list[Any] = []
        for x in flat:
            inside = _opened(x, depth)
            self._parts.append((x, inside))
            self.leaves += [x] if inside is None else inside.leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The same with other leaves."""
        rest = iter(leaves)
        return self._made(rest)

    def _made(self, rest: Any) -> Any:
        flat = []
        for x, inside in self._parts:
            if inside is None:
                flat.append(next(rest))
            else:
                x = copy.copy(x)
                x.__dict__.update(inside._made(rest))
                flat.append(x)
        return tree_unflatten(flat, self._spec)


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _opened(x: Any, depth: int) -> Structure | None:
    """What an object of somebody's own holds, if there are tensors in it."""
    if not depth or isinstance(x, (Tensor, torch.nn.Module, *WITHOUT_TENSORS, PackedSequence)):
        return None
    if not isinstance(getattr(x, "__dict__", None), dict):
        return None
    inside = Structure(vars(x), depth - 1)
    return inside if any(isinstance(y, Tensor) for y in inside.leaves) else None
