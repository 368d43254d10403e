"""What a forward pass keeps outside of its modules: in a list of auxiliary losses, a count, a cache, a generator of
random numbers, at the level of a class, a Python module or a closure.

Looks run copies of a model. What its modules hold is copied with them, and what stands outside is not: it is put back.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
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
_DICTS = (OrderedDict, dict)  # whose own methods are taken: somebody's classes may have others
_SEQUENCES = (list, set, deque)
_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN = _VALUES | {dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset, deque}
_PARTS = ("_parameters", "_modules")  # of a module, which has them copied, or which are others
_CODE = frozenset(
    {
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod, classmethod),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
    }
)
_OPEN = (types.SimpleNamespace, threading.local, UserDict, UserList)
"""Of the standard library's, what holds what somebody puts into it."""

Undo = Callable[[], bool]
"""Puts something back, and tells whether it was another."""


class Outside:
    """What forwards of a model reach outside of its modules, as it is when this is made.

    Attributes:
        changed: whether it was another when it was put back.

    Args:
        functions: what runs the model, and may keep something too.
    """

    changed = False

    def __init__(self, model: nn.Module, *functions: Any):
        self._names, self._defaults = reached(model, *functions)
        seen = set(map(id, model.modules()))
        self._undo = [x for some in self._names for x in _of_names(some, seen)]
        self._undo += [x for value in self._defaults for x in _of_value(value, seen, _DEPTH)]

    def put_back(self) -> None:
        told = [undo() for undo in self._undo]  # each of them
        self.changed = any(told)

    def values(self) -> list[tuple[str, Any]]:
        """What is there now, with names."""
        of = [str(some) or f"closure {number}" for number, some in enumerate(self._names)]
        found = [
            (f"{whose}.{x}", y) for whose, some in zip(of, self._names, strict=True) for x, y in some.now().items()
        ]
        found += [(f"default {number}", y) for number, y in enumerate(self._defaults)]
        of_modules = [(f"{name}.{x}", b) for name, y in found if isinstance(y, nn.Module) for x, b in y.named_buffers()]
        return [(name, y) for name, y in found if _is_kept(y)] + of_modules


@contextmanager
def put_back(model: nn.Module, *functions: Any) -> Iterator[Outside]:
    """What forwards of the model reach outside of its modules is as it was when this ends; arguments as Outside's."""
    outside = Outside(model, *functions)
    try:
        yield outside
    finally:
        outside.put_back()


def _is_kept(x: Any) -> bool:
    """Whether a pass may have left it, and meets it in the next: no function, module or class, and nothing that a
    library has made once for all (a kernel, a pool of threads), unless it holds tensors."""
    cls = type(x)
    if cls in _CODE or isinstance(x, (type, nn.Module)):
        return False
    if cls in _PLAIN or isinstance(x, Tensor):
        return True
    return not is_of_library(cls) or _is_data(x) or any(isinstance(y, Tensor) for y in attributes_of(x).values())


def _is_data(x: Any) -> bool:
    return isinstance(x, (torch.Generator, random.Random, *_OPEN)) or type(x).__module__.startswith("numpy")


def _of_names(names: Names, seen: set[int]) -> Iterator[Undo]:
    before = names.now()
    yield partial(_put_names_back, names, before)
    for x in before.values():
        if type(x) not in _CODE:
            yield from _of_value(x, seen, _DEPTH)


def _put_names_back(names: Names, before: dict[str, Any]) -> bool:
    now, changed = names.now(), False
    for name, x in now.items():
        if before.get(name, names) is not x and _is_kept(x) and not name.startswith("__"):
            changed = True
            if name in before:
                names.put(name, before[name])
            else:
                names.remove(name)
    for name in before.keys() - now.keys():
        changed = True
        names.put(name, before[name])
    return changed


def _of_value(x: Any, seen: set[int], depth: int) -> Iterator[Undo]:
    if type(x) in _VALUES or id(x) in seen or not depth:
        return
    seen.add(id(x))
    inside: list[Any] = []
    if isinstance(x, dict):
        inside = list(dict.values(x))
        yield partial(_put_dict_back, x, dict(dict.items(x)))
    elif isinstance(x, _SEQUENCES):
        inside = list(_base(x, _SEQUENCES).__iter__(x))
        yield partial(_put_sequence_back, x, [*inside])
    elif isinstance(x, (tuple, frozenset)):
        inside = list(x)
    if isinstance(x, Tensor):
        yield from _of_tensor(x)
        if x.is_leaf and x.requires_grad:  # a look's backward pass may come to it
            yield partial(_put_gradient_back, x, x.grad)
            inside = [x.grad]
    elif isinstance(x, nn.Module):
        for module in x.modules():
            if module is x or id(module) not in seen:
                seen.add(id(module))
                held = _attributes(module)
                yield partial(_put_object_back, module, held)
                inside += held.values()
    elif type(x) in _CODE or type(x) in _PLAIN or isinstance(x, type):
        pass
    elif isinstance(x, types.MethodType):
        inside = [x.__self__]
    elif _is_data(x) and not isinstance(x, _OPEN):
        yield from _of_state(x)
    elif isinstance(x, _OPEN) or not is_of_library(type(x)):
        held = _attributes(x)
        yield partial(_put_object_back, x, held)
        inside += held.values()
    for y in inside if len(inside) <= _MANY else ():
        yield from _of_value(y, seen, depth - 1)


def _base(x: Any, kinds: Sequence[Any]) -> Any:
    return next(kind for kind in kinds if isinstance(x, kind))


def _put_dict_back(x: Any, before: dict[Any, Any]) -> bool:
    base, now = _base(x, _DICTS), dict(dict.items(x))
    if len(now) == len(before) and all(a is b and now[a] is before[b] for a, b in zip(now, before, strict=True)):
        return False
    base.clear(x)
    for key, y in (*before.items(), *((k, y) for k, y in now.items() if k not in before and not _is_kept(y))):
        base.__setitem__(x, key, y)
    return True


def _put_sequence_back(x: Any, before: list[Any]) -> bool:
    base = _base(x, _SEQUENCES)
    now = list(base.__iter__(x))
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return False
    base.clear(x)
    (base.update if base is set else base.extend)(x, before)
    return True


def _attributes(x: Any) -> dict[str, Any]:
    return {name: y for name, y in attributes_of(x).items() if name not in _PARTS}


def _put_object_back(x: Any, before: dict[str, Any]) -> bool:
    now, changed = _attributes(x), False
    for name in now.keys() | before.keys():
        if name not in before:
            if _is_kept(now[name]):
                changed = True
                object.__delattr__(x, name)
        elif name not in now or (now[name] is not before[name] and _is_kept(now[name])):
            changed = True
            object.__setattr__(x, name, before[name])
    return changed


def _put_gradient_back(x: Tensor, before: Tensor | None) -> bool:
    x.grad = before
    return False


def _of_tensor(x: Tensor) -> Iterator[Undo]:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not (x.is_meta or x.is_quantized)
    if plain and x.numel() <= _LARGE:
        yield partial(_put_tensor_back, x, x.data, x.detach().clone())
    elif not x.is_inference():
        version = x._version
        yield lambda: bool(x._version != version)


def _put_tensor_back(x: Tensor, data: Tensor, before: Tensor) -> bool:
    changed = x.data_ptr() != data.data_ptr() or x.shape != data.shape
    if changed:
        x.data = data
    if not torch.equal(data, before):  # or it is NaN
        changed = changed or not bool(((data == before) | ((data != data) & (before != before))).all())
        with torch.inference_mode(x.is_inference()):
            data.copy_(before)
    return changed


def _of_state(x: Any) -> Iterator[Undo]:
    """Generators of random numbers (not those that all share, of which ``same_random_numbers`` knows), and NumPy's
    arrays. Of a generator it is not told whether it has drawn."""
    numpy: Any = sys.modules.get("numpy")
    if x is torch.default_generator or (numpy is not None and x is numpy.random.mtrand._rand):
        return
    if isinstance(x, torch.Generator):
        yield partial(_set, x.set_state, x.get_state())
    elif isinstance(x, random.Random):
        if not isinstance(x, random.SystemRandom):
            yield partial(_set, x.setstate, x.getstate())
    elif isinstance(x, numpy.random.RandomState):
        yield partial(_set, x.set_state, x.get_state())
    elif isinstance(x, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits = getattr(x, "bit_generator", x)
        yield partial(_set, partial(setattr, bits, "state"), bits.state)
    elif isinstance(x, numpy.ndarray) and x.size <= _LARGE and x.flags.writeable:
        yield partial(_put_array_back, x, x.copy())


def _set(put: Callable[[Any], object], state: Any) -> bool:
    put(state)
    return False


def _put_array_back(x: Any, before: Any) -> bool:
    changed = x.tobytes() != before.tobytes()
    if changed:
        x[...] = before
    return changed
