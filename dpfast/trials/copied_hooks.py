"""Forward hooks of the user's in copies of a model: what they do to samples is part of what it computes, and what they
keep (what a layer gave, counts) is not to change because it is looked at. So each runs on copies of what it reaches.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dpfast.taps import INERT, is_a_method, names_in, stands_alone, tensors_in
from dpfast.trials.reached import is_of_library

_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "opacus", "dpfast"})
"""Whose hooks mix no samples: they make weights, move tensors, and collect what layers give."""

_MOST = 2**20  # numbers in tensors that are copied for a hook
_DEPTH = 8  # of functions in functions


class _Copied:
    """A hook's copy; where it fails on a few samples it is as if it were not there."""

    def __init__(self, hook: Any):
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.hook(*args, **kwargs)
        except Exception:  # whatever somebody's own raises
            return None


def hang_up_copies(model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Hangs copies of forward hooks and pre-hooks that reach tensors, modules or objects on the copy's modules, each in
    its turn. Not those that cannot be copied, those of libraries, and those that have made the model's input.

    Args:
        memo: what stands in the copy for what in the model, by ids.
    """
    memo = dict(memo)
    for module in model.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks, there = getattr(module, name), getattr(memo.get(id(module)), name, None)
            if not hooks or there is None or (module is model and name == "_forward_pre_hooks"):
                continue
            own = {number: there.get(number) or _copy_of(hook, memo) for number, hook in hooks.items()}
            there.clear()
            there.update({number: hook for number, hook in own.items() if hook is not None})


def _copy_of(hook: Any, memo: dict[int, Any]) -> _Copied | None:
    if _is_of_library(hook):
        return None
    try:
        return _Copied(_copied(hook, memo, _DEPTH))
    except Exception:  # of what can be copied as little as a file
        return None


def _is_of_library(hook: Any) -> bool:
    names = [getattr(x, "__module__", None) or "" for x in (hook, type(getattr(hook, "__self__", hook)))]
    return any(name.partition(".")[0] in _LIBRARIES for name in names)


def _copied(x: Any, memo: dict[int, Any], depth: int) -> Any:
    if isinstance(x, types.MethodType):
        return types.MethodType(x.__func__, _copied(x.__self__, memo, depth))
    if isinstance(x, types.FunctionType):
        return _copied_function(x, memo, depth)
    if is_a_method(x):
        return getattr(_copied(x.__self__, memo, depth), x.__name__)
    if isinstance(x, INERT):
        return x
    if id(x) not in memo and sum(y.numel() for y in _tensors(x)) > _MOST:
        raise NotImplementedError("what it holds is large")
    return copy.deepcopy(x, memo)


def _tensors(x: Any) -> Iterator[Tensor]:
    yield from tensors_in(x)
    for y in getattr(x, "__dict__", {}).values():
        yield from tensors_in(y)


def _copied_function(function: types.FunctionType, memo: dict[int, Any], depth: int) -> types.FunctionType:
    """With copies of what it reaches by name, in cells and by default."""
    if stands_alone(function) or (function.__closure__ is None and is_of_library(function)):
        return function
    if id(function) in memo:  # it may name itself
        return memo[id(function)]
    if not depth:
        raise NotImplementedError("functions within functions")

    def own(x: Any) -> Any:
        return _copied(x, memo, depth - 1)

    known, closure = function.__globals__, function.__closure__ or ()
    cells = tuple(types.CellType() for _ in closure)
    found = types.FunctionType(function.__code__, {**known}, function.__name__, None, cells)
    memo[id(function)] = found
    found.__globals__.update({name: own(known[name]) for name in names_in(function.__code__) if name in known})
    for cell, mine in zip(closure, cells, strict=True):
        if cell != types.CellType():
            mine.cell_contents = own(cell.cell_contents)
    found.__defaults__ = None if function.__defaults__ is None else tuple(map(own, function.__defaults__))
    found.__kwdefaults__ = {name: own(x) for name, x in (function.__kwdefaults__ or {}).items()}
    return found
