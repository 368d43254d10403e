"""What a layer's forward gave, where that is to be compared with what it gives when it runs again.

A layer without a rule runs again in the backward pass, with the attributes and buffers of then. Copies of its outputs
(what follows may change these in place) are kept until the two have been found to be the same, and once more where the
layer's numbers or buffers are others than they were then.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpfast.arithmetic import is_traced

R = TypeVar("R", bound=Callable[..., Any])

_NUMBERS = frozenset({type(None), bool, int, float, complex, str})

_run_again: set[Callable[..., Any]] = set()

_as_found: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""What layers read beside inputs and parameters, as it was when they last gave the same twice."""


class Gave:
    """Of one run of a layer, made when its forward has ended.

    Attributes:
        outputs: copies of those that are tapped.
    """

    def __init__(self, module: nn.Module, outputs: Sequence[Tensor], state: list[Any]):
        self.outputs = [x.detach().clone() for x in outputs]
        self._module, self._state = module, state
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Gave:
        """The same with ``function`` of every output."""
        found = copy.copy(self)
        found.outputs = list(map(function, self.outputs))
        return found

    def autocast(self) -> AbstractContextManager[object]:
        """As it was then."""
        stack = ExitStack()
        for device, dtype in self._autocast:
            stack.enter_context(torch.autocast(device, dtype))
        return stack

    def is_given_again(self) -> None:
        """The layer gives the same: no more copies while its state remains."""
        _as_found[self._module] = self._state


def runs_again(rule: R) -> R:
    """Decorates a rule that runs its layer's forward again."""
    _run_again.add(rule)
    return rule


def gave(module: nn.Module, outputs: Sequence[Tensor], rule: Callable[..., Any] | None) -> Gave | None:
    """What is to be compared; None: nothing is.

    Args:
        rule: of the layer; None: it has none.
    """
    if not (rule is None or rule in _run_again) or is_traced():
        return None
    state = _state(module)
    if _as_found.get(module) == state or any(type(x) is not Tensor or x.layout != torch.strided for x in outputs):
        return None
    return Gave(module, outputs, state)


def compare_next_if_changed(module: nn.Module) -> None:
    """Where what the layer reads is not what it was when it last gave the same twice: of the pass that runs nothing can
    be compared any more, but the next forward's outputs are kept."""
    if _as_found.get(module) != _state(module):
        _as_found.pop(module, None)


def _state(module: nn.Module) -> list[Any]:
    """Numbers, switches and words by their values, buffers by who they are and how often they were written to; of other
    attributes what they are."""
    found: list[Any] = []
    for m in module.modules():
        found += [x if type(x) in _NUMBERS else type(x) for x in vars(m).values()]
        found += [(id(x), x._version) for x in m._buffers.values() if x is not None and not x.is_inference()]
    return found
