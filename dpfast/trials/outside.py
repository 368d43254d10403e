"""What a forward pass keeps outside of its modules: in a list of auxiliary losses, a count, a cache, a generator of
random numbers, at the level of a class, a Python module or a closure.

Looks run copies of a model. What its modules hold is copied with them, and what stands outside is not: it is put back.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps import attributes_of
from dpfast.trials.generators import Generator, generator
from dpfast.trials.reached import Names, is_of_library, reached

_DEPTH = 6  # of objects in objects
_MANY = 1024  # entries: none is looked into where there are more
_LONG = 2**16  # entries: what has more is data
_MOST = 2**14  # objects
_LARGE = 2**24
_DICTS = (OrderedDict, dict)  # whose own methods are taken: somebody's classes may have others
_SEQUENCES = (list, set, deque)
_NONE = object()
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

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)

Undo = Callable[[], bool]
"""Puts something back, and tells whether it was another."""


class Outside:
    """What forwards of a model reach outside of its modules, as it is when this is made.

    Attributes:
        changed: whether it was another when it was put back.

    Args:
        functions: what runs the model, and may keep something too.
        most: numbers in a tensor; of larger ones, which are data, no copies are made.
    """

    changed = False

    def __init__(self, model: nn.Module, *functions: Any, most: int = _LARGE):
        self._names, self._defaults = reached(model, *functions)
        self._seen, self._most = set(map(id, model.modules())), most
        self._limit = len(self._seen) + _MOST
        self._undo = [x for some in self._names for x in self._of_names(some)]
        self._undo += [x for value in self._defaults for x in self._of_whatever(value)]

    def put_back(self) -> None:
        told = list(map(_done, self._undo))  # each of them
        self.changed = any(told)

    def values(self) -> list[tuple[str, Any]]:
        """What is there now, with names."""
        of = [str(some) or f"closure {number}" for number, some in enumerate(self._names)]
        found = [
            (f"{whose}.{x}", y) for whose, some in zip(of, self._names, strict=True) for x, y in some.now().items()
        ]
        found += [(f"default {number}", y) for number, y in enumerate(self._defaults)]
        of_modules = [(f"{name}.{x}", b) for name, y in found if isinstance(y, nn.Module) for x, b in y.named_buffers()]
        return [(name, y) for name, y in found if _is_kept(y) and not _is_long(y)] + of_modules

    def _of_names(self, names: Names) -> Iterator[Undo]:
        before = names.now()
        yield functools.partial(_put_names_back, names, before)
        for x in before.values():
            if type(x) not in _CODE:
                yield from self._of_whatever(x)

    def _of_whatever(self, x: Any) -> list[Undo]:
        """Nothing of what cannot be looked at."""
        try:
            return list(self._of_value(x, _DEPTH))
        except Exception:  # whatever an object of somebody's own raises
            return []

    def _of_value(self, x: Any, depth: int) -> Iterator[Undo]:
        if type(x) in _VALUES or id(x) in self._seen or not depth or len(self._seen) > self._limit or _is_long(x):
            return
        self._seen.add(id(x))
        inside: list[Any] = []
        cls = type(x)  # what an object says of its class may be another's (a proxy)
        if issubclass(cls, dict):
            inside = list(dict.values(x))
            yield functools.partial(_put_dict_back, x, dict(dict.items(x)))
        elif issubclass(cls, _SEQUENCES):
            inside = list(_base(x, _SEQUENCES).__iter__(x))
            yield functools.partial(_put_sequence_back, x, [*inside])
        elif issubclass(cls, (tuple, frozenset)):
            inside = list(x)
        if isinstance(x, Tensor):
            yield from self._of_tensor(x)
            inside += (held := _attributes(x)).values()
            yield functools.partial(_put_object_back, x, held)
            if x.is_leaf and x.requires_grad:  # a look's backward pass may come to it
                yield functools.partial(_put_gradient_back, x, x.grad)
                inside.append(x.grad)
        elif isinstance(x, nn.Module):
            for module in x.modules():
                if module is x or id(module) not in self._seen:
                    self._seen.add(id(module))
                    held = _attributes(module)
                    yield functools.partial(_put_object_back, module, held)
                    inside += held.values()
        elif type(x) in _CODE or type(x) in _PLAIN or isinstance(x, type):
            pass
        elif isinstance(x, types.MethodType):
            inside = [x.__self__]
        elif isinstance(x, functools.partial):
            inside = [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, functools._lru_cache_wrapper):
            inside = _remembered(x)
        elif isinstance(x, _WEAK):
            yield functools.partial(_put_weak_back, x, before := dict(x.items()))
            inside = [*before.values()]
        elif _is_data(x) and not isinstance(x, _OPEN):
            yield from self._of_state(x)
        elif isinstance(x, _OPEN) or not is_of_library(type(x)):
            held = _attributes(x)
            yield functools.partial(_put_object_back, x, held)
            inside += held.values()
        for y in inside if len(inside) <= _MANY else ():
            yield from self._of_value(y, depth - 1)

    def _of_tensor(self, x: Tensor) -> Iterator[Undo]:
        plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not (x.is_meta or x.is_quantized)
        if plain and x.numel() <= self._most:
            yield functools.partial(_put_tensor_back, x, x.data, x.detach().clone(), _version(x))
        elif not x.is_inference():
            version = _version(x)
            yield lambda: _version(x) != version

    def _of_state(self, x: Any) -> Iterator[Undo]:
        """Random generators, variables of contexts and NumPy's arrays."""
        numpy: Any = sys.modules.get("numpy")
        if (own := generator(x)) is not None:
            yield functools.partial(_put_state_back, own, own.get())
        elif isinstance(x, ContextVar):
            if (value := _value_of(x)) is not _NONE:
                yield functools.partial(_put_context_back, x, value, x.set(value))
        elif numpy is not None and isinstance(x, numpy.ndarray) and x.size <= self._most and x.flags.writeable:
            yield functools.partial(_put_array_back, x, x.copy())


@contextmanager
def put_back(model: nn.Module, *functions: Any, most: int = _LARGE) -> Iterator[Outside]:
    """What forwards of the model reach outside of its modules is as it was when this ends; arguments as Outside's."""
    outside = Outside(model, *functions, most=most)
    try:
        yield outside
    finally:
        outside.put_back()


def _stays(x: Any) -> bool:
    """Whether it is what a library has made once for all (a kernel, a pool of threads) and holds no tensors."""
    cls = type(x)
    if cls in _CODE or cls in _PLAIN or issubclass(cls, (type, nn.Module, Tensor)) or not is_of_library(cls):
        return False
    return not (_is_data(x) or any(isinstance(y, Tensor) for y in attributes_of(x).values()))


def _is_kept(x: Any) -> bool:
    """Whether a pass may have left it, and meets it in the next."""
    return not (type(x) in _CODE or issubclass(type(x), (type, nn.Module)) or _stays(x))


def _is_data(x: Any) -> bool:
    return isinstance(x, (torch.Generator, random.Random, ContextVar, *_OPEN, *_WEAK)) or type(x).__module__.startswith(
        "numpy"
    )


def _is_long(x: Any) -> bool:
    return issubclass(type(x), (dict, *_SEQUENCES, tuple)) and x.__len__() > _LONG


def _done(undo: Undo) -> bool:
    try:
        return undo()
    except Exception:  # of an object that lets nobody write to it
        return True


def _remembered(x: Any) -> list[Any]:
    """The results that a function remembers (``functools.cache``), which it tells nobody but the garbage collector."""
    return [z for y in gc.get_referents(x) for z in (y.values() if type(y) is dict else [y])]


def _as_it_is_to_be(now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """As it was, but for what stays."""
    there = {key: now[key] if key in now and now[key] is not x and _stays(now[key]) else x for key, x in before.items()}
    return {**there, **{key: x for key, x in now.items() if key not in before and _stays(x)}}


def _differing(now: dict[Any, Any], then: dict[Any, Any]) -> list[Any]:
    return [key for key in now | then if now.get(key, then) is not then.get(key, then)]


def _put_names_back(names: Names, before: dict[str, Any]) -> bool:
    now = names.now()
    then = _as_it_is_to_be(now, before)
    changed = [name for name in _differing(now, then) if not (name[:2] == name[-2:] == "__")]
    for name in changed:
        if name in then:
            names.put(name, then[name])
        else:
            names.remove(name)
    return bool(changed)


def _base(x: Any, kinds: Sequence[Any]) -> Any:
    return next(kind for kind in kinds if issubclass(type(x), kind))


def _put_dict_back(x: Any, before: dict[Any, Any]) -> bool:
    base, now = _base(x, _DICTS), dict(dict.items(x))
    if len(now) == len(before) and all(a is b and now[a] is before[b] for a, b in zip(now, before, strict=True)):
        return False
    base.clear(x)
    for key, y in _as_it_is_to_be(now, before).items():
        base.__setitem__(x, key, y)
    return True


def _put_weak_back(x: Any, before: dict[Any, Any]) -> bool:
    now = dict(x.items())
    then = _as_it_is_to_be(now, before)
    changed = _differing(now, then)
    for key in changed:
        if key in then:
            x[key] = then[key]
        else:
            del x[key]
    return bool(changed)


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
    now = _attributes(x)
    then = _as_it_is_to_be(now, before)
    changed = _differing(now, then)
    for name in changed:  # past what its class makes of that
        if isinstance(getattr(type(x), name, None), types.MemberDescriptorType):
            object.__setattr__(x, name, then[name]) if name in then else object.__delattr__(x, name)
        elif name in then:
            vars(x)[name] = then[name]
        else:
            del vars(x)[name]
    return bool(changed)


def _put_gradient_back(x: Tensor, before: Tensor | None) -> bool:
    x.grad = before
    return False


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _put_tensor_back(x: Tensor, data: Tensor, before: Tensor, version: int) -> bool:
    changed = x.data_ptr() != data.data_ptr() or x.shape != data.shape
    if changed:
        x.data = data
    if x.device.type != "cpu":  # whose values would be waited for
        written = _version(x) != version
    else:
        same = torch.equal(data, before)  # or it is NaN; item(), as a look answers bool() itself
        written = not (same or ((data == before) | ((data != data) & (before != before))).all().item())
    if written:
        with torch.inference_mode(x.is_inference()):
            data.copy_(before)
    return changed or written


def _put_state_back(own: Generator, state: Any) -> bool:
    """Not said to have changed: how much is drawn may follow from samples, and what comes next is as random then."""
    own.put(state)
    return False


def _value_of(x: ContextVar[Any]) -> Any:
    try:
        return x.get()
    except LookupError:
        return _NONE


def _put_context_back(x: ContextVar[Any], value: Any, token: Any) -> bool:
    changed = _value_of(x) is not value
    x.reset(token)
    return changed


def _put_array_back(x: Any, before: Any) -> bool:
    changed = x.tobytes() != before.tobytes()
    if changed:
        x[...] = before
    return changed
