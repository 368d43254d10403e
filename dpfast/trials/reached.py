"""What a forward pass can reach outside of the modules that it belongs to, as its code says: globals, variables of
closures, defaults of arguments, attributes of functions, classes and Python modules.

From ``forward`` on, all functions and methods of the names that occur are followed, in whatever class they stand: more
than what runs, and all that may. Of installed packages, only in the files that the model's classes stand in, and what
these name of other files of their packages.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from dis import opmap
from typing import Any, NamedTuple

from torch import Tensor, nn

from dpfast.taps import TappedForward, attributes_of, names_in

_LIBRARIES = frozenset({"torch", "opacus", "dpfast"}) | sys.stdlib_module_names
_INSTALLED = ("site-packages", "dist-packages")
_UNNAMED = frozenset({"__call__", "__getattr__"})
"""Methods that run without being named, of classes of modules; of other classes, all that have such names may."""

_FUNCTIONS_IN = ("__func__", "__self__", "__wrapped__", "func", "args", "fget", "fset")
"""Of methods, of what a decorator has made, of partials and properties."""

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_STRINGS = frozenset({"globals", "vars", "getattr", "setattr", "modules", "__dict__"})
_FEW = 64  # functions in a container of somebody's own
_DEPTH = 3  # of functions in functions
_STORE_GLOBAL = opmap["STORE_GLOBAL"]


class Names(NamedTuple):
    """Some of the names in what has names.

    Attributes:
        where: the globals of a Python module (a dict), that module, a class, a function, or a variable of a closure.
        some: the names; None: all.
    """

    where: Any
    some: Iterable[str] | None = None

    def now(self) -> dict[str, Any]:
        """What is there under them."""
        if isinstance(self.where, types.CellType):
            return {} if self.where == types.CellType() else dict.fromkeys(self.some or (), self.where.cell_contents)
        found = self.where if isinstance(self.where, dict) else vars(self.where)
        if self.some is None:
            return dict(found)
        return {name: found[name] for name in self.some if name in found}

    def put(self, name: str, value: Any) -> None:
        if isinstance(self.where, types.CellType):
            self.where.cell_contents = value
        elif isinstance(self.where, dict):
            self.where[name] = value
        elif isinstance(self.where, type):
            type.__setattr__(self.where, name, value)  # past what a metaclass makes of it
        else:
            vars(self.where)[name] = value

    def remove(self, name: str) -> None:
        if isinstance(self.where, types.CellType):
            del self.where.cell_contents
        elif isinstance(self.where, dict):
            del self.where[name]
        elif isinstance(self.where, type):
            type.__delattr__(self.where, name)
        else:
            del vars(self.where)[name]

    def __str__(self) -> str:
        if isinstance(self.where, dict):
            return str(self.where.get("__name__", "globals"))
        return str(getattr(self.where, "__qualname__", getattr(self.where, "__name__", "")))


def is_of_library(x: Any) -> bool:
    """Whether a function, class or Python module is of an installed package, or of the language."""
    return _is_library(_file_of(x))


def _file_of(x: Any) -> str:
    """The name of the Python module that it is, or stands in."""
    return (x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)) or "builtins"


def _package(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def _is_library(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return _package(name) in _LIBRARIES or any(folder in file for folder in _INSTALLED)


_known: weakref.WeakKeyDictionary[nn.Module, tuple[frozenset[int], _Code]] = weakref.WeakKeyDictionary()


def reached(model: nn.Module, *functions: Any) -> tuple[list[Names], list[Any]]:
    """Where a forward of the model, and functions that run it, may find or put something outside of its modules, and
    the defaults of arguments."""
    modules = list(model.modules())
    own = (y for m in modules for y in _functions_of(m))
    starts = {id(x): x for x in (*map(type, modules), *own, *_functions_in(functions, _DEPTH))}
    kind = frozenset(starts)
    known = _known.get(model)
    if known is None or known[0] != kind:
        known = _known[model] = kind, _Code(modules, starts.values())
    return known[1].names(), known[1].defaults()


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Functions that it holds, and classes of objects that it does."""
    for name, x in vars(module).items():
        if name == "forward":
            x = x.replaced if isinstance(x, TappedForward) else x
        elif name in _OF_EVERY_MODULE:
            continue
        yield from _functions_in(x, _DEPTH)


def _functions_in(x: Any, depth: int) -> Iterator[Any]:
    if type(x) in _PLAIN or isinstance(x, (types.ModuleType, Tensor)) or not depth:
        return
    if isinstance(x, (types.FunctionType, type)):
        yield x
    elif type(x) in (list, tuple, dict):
        for y in (list(x.values()) if isinstance(x, dict) else x) if len(x) <= _FEW else ():
            yield from _functions_in(y, depth - 1)
    else:
        yield type(x)
        for name in _FUNCTIONS_IN:
            if hasattr(type(x), name):
                yield from _functions_in(getattr(x, name, None), depth - 1)
        for y in () if is_of_library(type(x)) else attributes_of(x).values():
            if type(y) in _FUNCTIONS:
                yield from _functions_in(y, depth - 1)


class _Code:
    """That classes and functions reach. Held weakly, as it may hold the model."""

    def __init__(self, modules: Iterable[nn.Module], starts: Iterable[Any]):
        files = {_file_of(c) for cls in {type(m) for m in modules} for c in cls.__mro__ if "forward" in vars(c)}
        self._files = {file for file in files if _package(file) not in _LIBRARIES}
        self._packages = {_package(file) for file in self._files}
        self._functions: dict[int, weakref.ref[types.FunctionType]] = {}
        self._classes: dict[int, weakref.ref[type]] = {}
        # Of Python modules, and of globals, with the functions that have these.
        self._modules: dict[int, tuple[types.ModuleType, dict[str, None]]] = {}
        self._globals: dict[int, tuple[list[weakref.ref[types.FunctionType]], dict[str, None]]] = {}
        self._named, self._methods = {"forward"}, dict[str, list[Any]]()
        self._todo: list[types.FunctionType] = []
        for x in starts:
            self._meet(x)
        while self._todo:
            self._follow(self._todo.pop())
        del self._methods, self._named, self._todo

    def names(self) -> list[Names]:
        functions = _alive(self._functions.values())
        found = [Names(module, names) for module, names in self._modules.values()]
        found += [Names(f.__globals__, names) for refs, names in self._globals.values() for f in _alive(refs)[:1]]
        cells = [pair for f in functions for pair in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)]
        found += {id(cell): Names(cell, (name,)) for name, cell in cells}.values()
        own = (f for f in functions if vars(f) or not is_of_library(f))
        return [*found, *map(Names, (*_alive(self._classes.values()), *own))]

    def defaults(self) -> list[Any]:
        functions = _alive(self._functions.values())
        return [x for f in functions for x in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())]

    def _is_own(self, x: Any, near: bool = False) -> bool:
        """Of the files that are followed; near: or another one of their packages."""
        file = _file_of(x)
        return file in self._files or not _is_library(file) or (near and _package(file) in self._packages)

    def _meet(self, value: Any, near: bool = True) -> None:
        """What code reaches; near: that stands in a file that is followed."""
        for x in _functions_in(value, _DEPTH):
            if isinstance(x, types.FunctionType):
                if id(x) not in self._functions and self._is_own(x, near):
                    self._functions[id(x)] = weakref.ref(x)
                    self._todo.append(x)
            else:
                for cls in x.__mro__:
                    if id(cls) not in self._classes and self._is_own(cls, near):
                        self._classes[id(cls)] = weakref.ref(cls)
                        self._meet_methods(cls)

    def _meet_methods(self, cls: type) -> None:
        of_modules = issubclass(cls, nn.Module)
        for name, x in list(vars(cls).items()):
            if name in self._named or (name in _UNNAMED if of_modules else name.startswith("__")):
                self._meet(x)
            else:
                self._methods.setdefault(name, []).append(x)

    def _follow(self, function: types.FunctionType) -> None:
        own, known, near = _names_in(function.__code__), function.__globals__, self._is_own(function)
        self._named.update(own)
        for method in [x for name in own for x in self._methods.pop(name, ())]:
            self._meet(method)
        named = {name: known[name] for name in own if name in known}
        package = known.get("__package__")
        for name in (x for some in own for x in (some, f"{package}.{some}")):  # may be imported within it
            if name not in named and isinstance(module := sys.modules.get(name), types.ModuleType):
                named[name] = module
        refs, names = self._globals.setdefault(id(known), ([], {}))
        refs.append(weakref.ref(function))
        all_of_them = _stores_globals(function.__code__) or _BY_STRINGS & {*own}
        names.update(dict.fromkeys(own if all_of_them else [name for name in own if name in known]))
        for module in list(named.values()):
            if isinstance(module, types.ModuleType) and self._is_own(module, near):
                self._modules.setdefault(id(module), (module, {}))[1].update(dict.fromkeys(own))
                named.update({f"{module.__name__}.{name}": x for name, x in vars(module).items() if name in own})
        for x in (*named.values(), *bound_in(function).values()):
            self._meet(x, near)


def _names_in(code: types.CodeType) -> list[str]:
    """And strings, where it asks by these."""
    own = names_in(code)
    return [*own, *_strings_in(code)] if _BY_STRINGS & {*own} else own


def _strings_in(code: types.CodeType) -> Iterator[str]:
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _strings_in(x)
        elif isinstance(x, str) and x.isidentifier():
            yield x


def _stores_globals(code: types.CodeType) -> bool:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return _STORE_GLOBAL in code.co_code[::2] or any(map(_stores_globals, inner))


def _alive(refs: Iterable[Any]) -> list[Any]:
    return [x for ref in refs if (x := ref()) is not None]


def bound_in(function: types.FunctionType) -> dict[str, Any]:
    """What it has for itself: in variables of its closure, by default, as attributes, and where a copy was made of it
    with globals of its own, in these."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    own |= {f"default {i}": x for i, x in enumerate(function.__defaults__ or ())}
    own |= {**(function.__kwdefaults__ or {}), **vars(function)}
    known = function.__globals__
    if known is not vars(sys.modules.get(function.__module__, sys)):
        own |= {name: known[name] for name in names_in(function.__code__) if name in known}
    return own
