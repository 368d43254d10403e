"""Finds what a forward pass on fake tensors has left outside of the copy that ran and no code names that is known of
(see ``outside``): in a library's cache, where the model's own forward would meet tensors without values.

Weak references are kept to what the pass makes. Where some is still alive when the pass has ended, the garbage
collector says what holds it, and the entries are taken out again.
"""

from __future__ import annotations

import collections
import functools
import gc
import logging
import random
import re
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast.errors import warn_caller
from dpfast.taps import remaining, saves_as_torch_does, taps_suspended, tensors_in

P = ParamSpec("P")
R = TypeVar("R")

_DEPTH = 6  # holders of holders: a tensor in a tuple, in an object's dict, in a cache
_GUESSED = (
    "a trial run of the model on tensors without values has left some in {}; it is None now, as nobody knows what it "
    "was before. Keep what a forward remembers in a dict, a list, or an attribute of the module or its class"
)
_guessed: list[str] = []
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_LIBRARIES = ("torch", "dpfast", "builtins", "typing", "abc")

ONE_AT_A_TIME = threading.RLock()
"""What trial runs change and set back is the process's: its garbage collector, random numbers, warnings. Of two threads
that met there, one would set back what the other has changed; and noise that was drawn from torch's own generator
meanwhile would be drawn once more."""


def taking_back(run: Callable[Concatenate[LeftBehind, P], R]) -> Callable[P, R]:
    """Decorates a function that runs copies of a model: what that leaves elsewhere is taken back, however it ends."""

    @functools.wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with ONE_AT_A_TIME:
            left = LeftBehind()
            try:
                return run(left, *args, **kwargs)
            except Exception as error:
                each: BaseException | None = error
                while each is not None:  # they would hold all that was there
                    traceback.clear_frames(each.__traceback__)
                    each = each.__context__
                raise
            finally:
                left.take_back()

    return call


class LeftBehind:
    """What one pass leaves, from before it begins."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Tensor]] = []
        self._collects = gc.isenabled()
        gc.unfreeze()  # what is frozen (gc.freeze()) is named as nobody's holder
        gc.collect(0)  # what is young afterwards has come with the pass
        gc.disable()

    def noting(self) -> TorchDispatchMode:
        """Within it the pass runs."""
        return _Noting(self.note)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """The pass has made these."""
        self._made += map(weakref.ref, tensors)

    def take_back(self) -> None:
        """The pass has ended, and nobody who may know has any of its tensors."""
        if self._collects:
            gc.enable()
        torch.clear_autocast_cache()  # what it has cast would be suspected each time
        if not any(made() is not None for made in self._made):
            return
        young = set(map(id, gc.get_objects(generation=0)))
        gc.collect(0)  # the copy, which holds itself; all of it is young
        if any(made() is not None for made in self._made):
            gc.collect()  # rarely, as it goes through all of the process: what is older, and gone, holds some
        level: list[Any] = list({id(x): x for made in self._made for x in [made()] if x is not None}.values())
        if level:
            young &= set(map(id, gc.get_objects()))  # of what is no more, others may have the numbers
        for _ in range(_DEPTH):
            held = {id(x) for x in level}
            up: dict[int, Any] = {}
            for holder in gc.get_referrers(*level) if level else ():
                if holder is not level and not isinstance(holder, types.FrameType) and self._holds(holder, held, young):
                    up[id(holder)] = holder
            level = list(up.values())

    def _holds(self, holder: Any, held: set[int], young: set[int]) -> bool:
        """Takes what is held out of its holder; True: that has come with the pass itself, and goes with it."""
        if type(holder) is dict:
            return self._dict_holds(holder, held, young)
        if id(holder) in young or isinstance(holder, (tuple, frozenset, functools.partial)) or _is_of_a_copy(holder):
            return True
        if isinstance(holder, dict):
            _without(holder, held)
        elif isinstance(holder, (list, collections.deque)):
            kept = [x for x in holder if id(x) not in held]
            holder.clear()
            holder.extend(kept)
        elif isinstance(holder, set):
            holder.difference_update([x for x in holder if id(x) in held])
        elif isinstance(holder, types.CellType):
            if not _is_of_libraries(holder):
                holder.cell_contents = None
                _guessed.append("a variable of a closure")
        elif isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(getattr(holder, "__dict__", None), dict):  # whose attributes are in no dict of their own yet
            _without_attributes(holder, vars(holder), held)
        return False

    def _dict_holds(self, found: dict[Any, Any], held: set[int], young: set[int]) -> bool:
        owners = [x for x in gc.get_referrers(found) if not isinstance(x, types.FrameType)]
        for owner in owners:
            if isinstance(owner, functools._lru_cache_wrapper):
                owner.cache_clear()
                return False
            if isinstance(owner, type) or getattr(owner, "__dict__", None) is found:
                if id(owner) in young or _is_of_a_copy(owner):
                    return True
                _without_attributes(owner, found, held)
                return False
        # A dict is young as well if it was empty until now: it goes where its holder has come with the pass, or has got
        # it by a size.
        if id(found) in young and any(id(x) in young or _by_size(x, found) for x in owners):
            return True
        _without(found, held)
        return False


def say_what_was_guessed() -> None:
    """Where nothing keeps warnings back any more."""
    names = ", ".join(dict.fromkeys(_guessed))
    _guessed.clear()
    if names:
        warn_caller(_GUESSED.format(names))


class _Noting(TorchDispatchMode):
    def __init__(self, note: Callable[[list[Tensor]], None]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._note(tensors_in(output))
        return output


def _is_of_a_copy(x: Any) -> bool:
    """Modules that ran are those of a copy; what is dpfast's, and nodes of autograd's graph, are of it, though a
    collection may have aged them."""
    ours = type(x).__module__.partition(".")[0] == "dpfast" and not isinstance(x, type)
    return ours or isinstance(x, (nn.Module, torch._C._FunctionBase))


def _is_of_libraries(cell: types.CellType) -> bool:
    """Whether the functions and frames that have this variable are torch's or dpfast's: a traceback may keep some."""
    modules = []
    for holder in gc.get_referrers(cell):
        if isinstance(holder, types.FrameType):
            modules.append(holder.f_globals.get("__name__", ""))
        elif type(holder) is tuple:
            modules += [f.__module__ or "" for f in gc.get_referrers(holder) if isinstance(f, types.FunctionType)]
    return all(name.partition(".")[0] in _LIBRARIES for name in modules)


def _by_size(outer: Any, inner: dict[Any, Any]) -> bool:
    """Whether it is a dict that holds another by what is no name, and so has got it when it was asked for."""
    return isinstance(outer, dict) and any(x is inner and not isinstance(key, str) for key, x in outer.items())


def _without(found: dict[Any, Any], held: set[int]) -> None:
    for key in [key for key, x in found.items() if id(x) in held or id(key) in held]:
        del found[key]


def _without_attributes(owner: Any, attributes: dict[str, Any], held: set[int]) -> None:
    for name in [name for name, x in attributes.items() if id(x) in held]:
        setattr(owner, name, None)
        _guessed.append(f"{getattr(owner, '__qualname__', type(owner).__qualname__)}.{name}")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Random numbers, warnings, taps outside of the copy and what functions remember are as if nothing had run. The
    garbage collector waits: so many small objects come and go that it would look at everything many times."""
    with ONE_AT_A_TIME:
        before, collects, logged = random.getstate(), gc.isenabled(), _LOG.disabled
        numpy_random: Any = sys.modules.get("numpy.random")
        of_numpy = None if numpy_random is None else numpy_random.get_state()
        missed = [(f, f.cache_info().misses) for f in _remembering(len(sys.modules))]
        try:
            gc.disable()
            _LOG.disabled = True  # of sizes that do not fit, with a traceback each
            with (
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                torch.no_grad(),
                taps_suspended(),
                nullcontext() if saves_as_torch_does() else remaining(),  # a checkpoint counts what is saved within it
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            if collects:
                gc.enable()
            _LOG.disabled = logged
            if random.getstate() != before:
                random.setstate(before)
            if numpy_random is not None:
                numpy_random.set_state(of_numpy)
            for f, misses in missed:  # a fake tensor that one remembered would turn up in the model's own forward
                if f.cache_info().misses != misses:
                    f.cache_clear()
            say_what_was_guessed()


@functools.lru_cache(maxsize=1)
def _remembering(modules: int) -> list[Any]:
    """Functions that remember results (``functools.cache``) and may be a model's; found again when more modules are
    imported. What torch's own remember, but for layers, are no tensors."""
    gc.unfreeze()  # or it would not be among all objects
    found = [f for f in gc.get_objects() if type(f) is functools._lru_cache_wrapper]
    return [f for f in found if not _OF_NO_MODEL.match(getattr(f, "__module__", None) or "")]


_OF_NO_MODEL = re.compile(r"(torch(?!\.nn\b)|importlib|typing|_operator|operator|re|sympy|triton)(\.|$)")
