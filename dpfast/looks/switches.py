"""What a caller sets on a model between forward passes (``model.task = "b"``, ``model.config.mix = True``): it may go
another way from then on with inputs that look as before, so these are another kind of input."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from operator import is_
from typing import Any

from torch import nn

from dpfast.looks.kinds import mode_named

_SIMPLE = (bool, int, float, str, type(None), enum.Enum)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NEW_IN_A_ROW = 4  # what has a value that it never had at so many calls is a counter, or a name of each step's own

_Place = tuple[int, str, str]
"""The number of a module, what in it has the attribute (nothing: itself), the attribute."""


class Switches:
    """Of one model: attributes of its modules and of objects that these hold (a configuration) that are truths, texts,
    small whole numbers, or 0 or 1. What a forward pass changes by itself is none, and torch's own layers have none.

    Args:
        of: those of the model of which this one is a copy.
    """

    def __init__(self, of: Switches | None = None) -> None:
        self._modules: list[nn.Module] = []
        self._places: list[_Place] = []
        self._where: list[tuple[dict[str, Any], str]] = []
        self._owners: list[tuple[dict[str, Any], str, Any]] = []
        self._all: list[dict[str, Any]] = []
        self._size = 0  # how many attributes these have
        self._held: list[Any] = []  # what the last forward pass has left there; of what is no switch, its type
        self._set: dict[_Place, Any] = {} if of is None else dict(of._set)
        self._first: dict[_Place, Any] = {}  # before anything was set
        self._had: dict[_Place, set[Any]] = {}
        self._new: dict[_Place, tuple[int, int]] = {}  # the last call with a new one, and how many in a row had one
        self._calls = 0
        self._key = frozenset[Any](self._set.items())

    def modes(self, model: nn.Module) -> tuple[Any, ...]:
        """What tells a forward pass that begins now from others: which modules are in training, and what has been set
        since the first one began."""
        if not self._modules:
            self._modules = list(model.modules())
            self._held = [_kept(x) for x in self._found()]
        now, self._calls = self._now(), self._calls + 1
        if now is None or not all(map(is_, now, self._held)):
            before = dict(zip(self._places, self._held, strict=True))
            if now is None:
                now = self._found()
            for place, x in zip(self._places, now, strict=True):
                if place in before and _mode(x) != _mode(before[place]):
                    self._note(place, _mode(before[place]), _mode(x))
                elif place not in before and x is not None:
                    self._note(place, None, _mode(x))
            self._held = [_kept(x) for x in now]
            self._key = frozenset(self._set.items())
        return bytes([m.training for m in self._modules]), self._key

    def hold(self) -> None:
        """A forward pass has ended: what it has left is how things stand."""
        now = self._now()
        if now is None or not all(map(is_, now, self._held)):
            self._held = [_kept(x) for x in (self._found() if now is None else now)]

    def _note(self, place: _Place, before: Any, mode: Any) -> None:
        had, (last, new) = self._had.setdefault(place, {before}), self._new.get(place, (0, 0))
        new = 0 if mode in had else new + 1 if last == self._calls - 1 else 1
        self._new[place] = self._calls, new
        had.add(mode)
        if new < _NEW_IN_A_ROW and mode != self._first.setdefault(place, before):
            self._set[place] = mode
        else:
            self._set.pop(place, None)

    def _now(self) -> list[Any] | None:
        """The values; None where there are other attributes than there were."""
        if sum(map(len, self._all)) != self._size or any(held.get(name) is not x for held, name, x in self._owners):
            return None
        try:
            return [held[name] for held, name in self._where]
        except KeyError:
            return None

    def _found(self) -> list[Any]:
        """The values, looked for anew."""
        self._places, self._where, self._owners, self._all = [], [], [], []
        for place, held in self._attributes():
            self._all.append(held)
            for name, x in held.items():
                if name not in _OF_EVERY_MODULE and isinstance(x, _SIMPLE):
                    self._places.append((*place, name))
                    self._where.append((held, name))
        self._size = sum(map(len, self._all))
        return [held[name] for held, name in self._where]

    def _attributes(self) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
        seen = set[int]()
        for i, module in enumerate(self._modules):
            if type(module).__module__.startswith("torch."):
                continue
            yield (i, ""), (own := vars(module))
            for name, x in own.items():
                if name in _OF_EVERY_MODULE or isinstance(x, (*_SIMPLE, nn.Module, type)) or callable(x):
                    continue
                held = getattr(x, "__dict__", None)
                if type(held) is dict and id(held) not in seen and not type(x).__module__.startswith("torch"):
                    seen.add(id(held))
                    self._owners.append((own, name, x))
                    yield (i, name), held


def _kept(x: Any) -> Any:
    return x if isinstance(x, _SIMPLE) else type(x)  # nothing that holds memory


def _mode(x: Any) -> Any:
    return mode_named(x) or (x if isinstance(x, type) else type(x))
