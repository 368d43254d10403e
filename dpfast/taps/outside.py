"""What a forward pass keeps outside of its modules: in a list of auxiliary losses, a count, a cache, a generator of
random numbers, at the level of a class, a Python module or a closure.

Looks run copies of a model. What its modules hold is copied with them, and what stands outside is not: it is put back.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps.inputs import attributes_of
from dpfast.taps.reached import Names, is_of_library, reached

_DEPTH = 6  # of objects in objects
_MANY = 1024  # entries: none is looked into where there are more
_LARGE = 2**20  # numbers: a larger tensor is data, and not copied
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_OPEN = (types.SimpleNamespace, threading.local)  # of the standard library's, what holds what somebody puts into it

Undo = Callable[[], None]


@contextmanager
def put_back(model: nn.Module, *functions: Any) -> Iterator[Callable[[], list[tuple[str, Any]]]]:
    """What forwards of the model reach outside of its modules is as it was when this ends. What this gives tells what
    that is, with names.

    Args:
        functions: what runs the model, and may keep something too.
    """
    names, defaults = reached(model, *functions)
    seen = set(map(id, model.modules()))
    undo = [x for some in names for x in _of_names(some, seen)]
    undo += [x for value in defaults for x in _of_value(value, seen, _DEPTH)]
    try:
        yield partial(_values, names, defaults)
    finally:
        for each in undo:
            each()


def _values(names: Sequence[Names], defaults: Sequence[Any]) -> list[tuple[str, Any]]:
    of = [str(some) or f"closure {number}" for number, some in enumerate(names)]
    found = [(f"{whose}.{x}", y) for whose, some in zip(of, names, strict=True) for x, y in some.now().items()]
    found += [(f"default {number}", y) for number, y in enumerate(defaults)]
    return [(name, y) for name, y in found if _is_kept(y)]


def _is_kept(x: Any) -> bool:
    """Whether a pass may have left it, and meets it in the next: no function, module or class, and nothing that a
    library has made once for all (a kernel, a pool of threads), unless it holds tensors."""
    if isinstance(x, (Tensor, *_VALUES)) or type(x) in _DICTS | _SEQUENCES:
        return True
    if isinstance(x, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module)):
        return False
    return not is_of_library(type(x)) or _is_data(x) or any(isinstance(y, Tensor) for y in attributes_of(x).values())


def _is_data(x: Any) -> bool:
    return isinstance(x, (torch.Generator, random.Random, *_OPEN)) or type(x).__module__.startswith("numpy")


def _of_names(names: Names, seen: set[int]) -> Iterator[Undo]:
    before = names.now()

    def undo() -> None:
        now = names.now()
        for name in now.keys() | before.keys():
            if name not in before:
                if _is_kept(now[name]):
                    names.remove(name)
            elif name not in now or (now[name] is not before[name] and _is_kept(now[name])):
                names.put(name, before[name])

    yield undo
    for x in before.values():
        yield from _of_value(x, seen, _DEPTH)


def _of_value(x: Any, seen: set[int], depth: int) -> Iterator[Undo]:
    if isinstance(x, _VALUES) or id(x) in seen or not depth:
        return
    seen.add(id(x))
    inside: list[Any] = []
    if type(x) in _DICTS:
        inside = list(x.values())
        yield _of_dict(x)
    elif type(x) in _SEQUENCES:
        inside = list(x)
        if not isinstance(x, (tuple, frozenset)):
            yield _of_sequence(x)
    elif isinstance(x, Tensor):
        if (undo := _of_tensor(x)) is not None:
            yield undo
    elif isinstance(x, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return
    elif isinstance(x, types.MethodType):
        inside = [x.__self__]
    elif _is_data(x) and not isinstance(x, _OPEN):
        yield from _of_state(x)
    elif isinstance(x, (nn.Module, *_OPEN)) or not is_of_library(type(x)):
        held = attributes_of(x)
        yield _of_object(x, held)
        inside = [y for name, y in held.items() if name != "_parameters"]
    for y in inside if len(inside) <= _MANY else ():
        yield from _of_value(y, seen, depth - 1)


def _of_dict(x: Any) -> Undo:
    before = dict(x)

    def undo() -> None:
        if len(x) == len(before) and all(a is b and x[a] is before[b] for a, b in zip(x, before, strict=True)):
            return
        stays = {key: y for key, y in x.items() if key not in before and not _is_kept(y)}
        x.clear()
        for some in (before, stays):
            for key, y in some.items():
                x[key] = y

    return undo


def _of_sequence(x: Any) -> Undo:
    before = list(x)

    def undo() -> None:
        if len(x) != len(before) or any(a is not b for a, b in zip(x, before, strict=True)):
            x.clear()
            (x.update if isinstance(x, set) else x.extend)(before)

    return undo


def _of_object(x: Any, before: dict[str, Any]) -> Undo:
    def undo() -> None:
        now = attributes_of(x)
        for name in now.keys() | before.keys():
            if name not in before:
                if _is_kept(now[name]):
                    object.__delattr__(x, name)
            elif name not in now or (now[name] is not before[name] and _is_kept(now[name])):
                object.__setattr__(x, name, before[name])

    return undo


def _of_tensor(x: Tensor) -> Undo | None:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not (x.is_meta or x.is_quantized)
    if not plain or x.numel() > _LARGE:
        return None
    data, before = x.data, x.detach().clone()

    def undo() -> None:
        if x.data_ptr() != data.data_ptr() or x.shape != data.shape:
            x.data = data
        if not torch.equal(data, before):
            with torch.inference_mode(x.is_inference()):
                data.copy_(before)

    return undo


def _of_state(x: Any) -> Iterator[Undo]:
    """Generators of random numbers (not those that all share, of which ``same_random_numbers`` knows), and NumPy's
    arrays."""
    numpy: Any = sys.modules.get("numpy")
    if x is torch.default_generator or (numpy is not None and x is numpy.random.mtrand._rand):
        return
    if isinstance(x, torch.Generator):
        yield partial(_set, x, x.get_state())
    elif isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        yield partial(x.setstate, x.getstate())
    elif isinstance(x, numpy.random.RandomState):
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits = getattr(x, "bit_generator", x)
        yield partial(setattr, bits, "state", bits.state)
    elif isinstance(x, numpy.ndarray) and x.size <= _LARGE and x.flags.writeable:
        yield partial(numpy.copyto, x, x.copy())


def _set(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)
