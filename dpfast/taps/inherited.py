"""Whether a module still runs what its class, or a base of it, has registered for: the forward, and every method that
this reaches on the module. Much is customised by these alone (``_conv_forward`` of torch's convolutions), and is
another function then.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn


class Methods(NamedTuple):
    """What a class's forward runs, as it was when something was registered for the class.

    Attributes:
        forward: itself. helpers: what it reaches by name that the class, or a base, has as a function or property.
        names: all that is read by name in any of these.
    """

    forward: Any
    helpers: tuple[tuple[str, Any], ...]
    names: frozenset[str]


_METHODS: dict[type, Methods] = {}
_OF_MEMORY = {"flatten_parameters"}  # where a recurrent layer's weights stand, which some switch off


def note_methods(*classes: type | str) -> None:
    """Notes those of now; of classes that are only named, when they are first met."""
    _METHODS.update((cls, _methods(cls)) for cls in classes if not isinstance(cls, str))
    _adds.cache_clear()


def methods_of(cls: type) -> Methods:
    """Those that were noted."""
    if cls not in _METHODS:
        note_methods(cls)
    return _METHODS[cls]


def _methods(cls: type) -> Methods:
    forward = _own(cls, "forward")
    found, left = {"forward": forward}, [forward]
    names: set[str] = set()
    while left:
        fresh = {name for function in _functions(left.pop()) for name in _names(function.__code__)} - names
        names |= fresh
        for name in fresh - vars(nn.Module).keys() - _OF_MEMORY:
            there = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
            if there and hasattr(there[0], "__get__"):
                found[name] = _own(cls, name)
                left += there  # also what it reaches by super()
    del found["forward"]
    return Methods(forward, tuple(found.items()), frozenset(names))


def inherits(module: nn.Module, base: type) -> bool:
    """Whether the module's forward computes what that of ``base``, a class of it, computed when it was registered."""
    cls: Any = type(module)
    methods = methods_of(base)
    return _own(cls, "forward") is methods.forward and has_helpers(module, methods.helpers) and not _adds(cls, base)


def has_helpers(module: nn.Module, helpers: tuple[tuple[str, Any], ...]) -> bool:
    """Whether neither its class nor the module itself has others."""
    cls, own = type(module), module.__dict__
    return all(name not in own and _own(cls, name) is function for name, function in helpers)


@lru_cache(maxsize=4096)
def _adds(cls: type, base: type) -> bool:
    """Whether the class computes what its base's forward takes for an attribute (a property in a parameter's place)."""
    above = cls.__mro__[: cls.__mro__.index(base)]
    mine = {name for c in above for name, x in vars(c).items() if hasattr(x, "__get__")}
    read = (mine & methods_of(base).names) - vars(nn.Module).keys() - _of_tensors()
    return bool(read - {name for name, _ in methods_of(base).helpers})


@lru_cache(maxsize=1)
def _of_tensors() -> frozenset[str]:
    """Names that are read of tensors, not of the module."""
    return frozenset(dir(Tensor))


def _own(cls: type, name: str) -> Any:
    found = getattr(cls, name, None)
    return getattr(found, "__func__", found)  # of a method of the class, which is another object each time


def _functions(x: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a function, method or property, and those that they are wrapped around."""
    for function in (getattr(x, "fget", None), getattr(x, "__func__", None), x):
        while function is not None:
            if isinstance(function, types.FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _names(x)
