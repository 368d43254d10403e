"""What a layer's forward gave, where that is to be compared with what it gives when it runs again.

A layer without a rule runs again in the backward pass, with the attributes and buffers of then. No outputs are kept for
that (what follows may change these in place, and they take memory) but two numbers of each. Comparing these waits for a
GPU: there it is done the first time, and where the layer reads something else than it did, as far as that can be seen.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpfast.arithmetic import is_traced

R = TypeVar("R", bound=Callable[..., Any])

_NUMBERS = frozenset({type(None), bool, int, float, complex, str})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_MOST = 16  # of what a list holds: it may be a history that grows

_HUGE = 1e8  # scores that are masked: by infinity, by what stands for it; beside these nothing else would count

_run_again: set[Callable[..., Any]] = set()

_as_found: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""What layers read that lasts, as it was when they last gave the same twice."""


class Gave:
    """Of one run of a layer, made when its forward has ended.

    Attributes:
        rounding: of the outputs' dtypes, the coarsest.
    """

    def __init__(self, module: nn.Module, outputs: Sequence[Tensor]):
        self.rounding = max((torch.finfo(x.dtype).eps for x in outputs), default=0.0)
        self._module, self._moved = module, list[Callable[[Tensor], Tensor]]()
        self._shapes = [x.shape for x in outputs]
        self._numbers = [_numbers(x) for x in outputs]
        self._waits = any(map(is_waited_for, outputs))
        self._state, self._lasting = (_state(module), _state(module, lasting=True)) if self._waits else ([], [])
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Gave:
        """The same with ``function``, which moves elements, of every output."""
        found = copy.copy(self)
        found._moved = [*self._moved, function]
        return found

    def autocast(self) -> AbstractContextManager[object]:
        """As it was then."""
        stack = ExitStack()
        for device, dtype in self._autocast:
            stack.enter_context(torch.autocast(device, dtype))
        return stack

    def is_to_be_compared(self) -> bool:
        if not self._waits:
            return True
        return self._state != _state(self._module) or self._lasting != _as_found.get(self._module)

    def is_like(self, outputs: Sequence[Tensor], up_to: float) -> bool:
        """Whether these are what it gave."""
        return all(map(self._is_like, outputs, self._shapes, self._numbers, itertools.repeat(up_to)))

    def _is_like(self, output: Tensor, shape: torch.Size, numbers: Tensor, up_to: float) -> bool:
        weights = None
        if self._moved:  # as the outputs have
            weights = functools.reduce(lambda x, function: function(x), self._moved, _weights(shape, output))
        if output.shape != (shape if weights is None else weights.shape):
            return False
        if output.is_meta:  # no values
            return True
        norm, product = (_numbers(output, weights).double() - numbers).abs().tolist()
        # Differences that know nothing of the weights, of which none is above one, make less of the product than that.
        most = up_to * float(numbers[0]) + torch.finfo(torch.float32).tiny
        return norm <= most and product <= 4.0 * most

    def is_given_again(self) -> None:
        """The layer gives the same."""
        if self._waits:
            _as_found[self._module] = self._lasting


def is_waited_for(x: Tensor) -> bool:
    """Whether who asks for its values waits until all that has been started has ended."""
    return x.device.type != "cpu"


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
    if any(type(x) is not Tensor or x.layout != torch.strided for x in outputs):
        return None
    return Gave(module, outputs)


def _numbers(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """The norm, and the product with weights of which each place has others, of what is not huge."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if is_waited_for(x) or not _is_small(x):
        x = torch.where(x.abs() < _HUGE, x, 0.0)  # NaN is not
    product = x
    if weights is not None:
        return torch.stack([x.norm(), torch.dot(x.flatten(), weights.flatten())])
    for size in reversed(x.shape):  # with no tensor of all of them
        product = product @ _along(size, x)
    return torch.stack([x.norm(), product])


def _is_small(x: Tensor) -> bool:
    if not x.numel():
        return True
    low, high = torch.aminmax(x)
    return bool((low > -_HUGE) & (high < _HUGE))  # of NaN neither is so


def _weights(shape: torch.Size, like: Tensor) -> Tensor:
    weights = torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    for size in shape:
        weights = weights.unsqueeze(-1) * _along(size, weights)
    return weights


def _along(size: int, like: Tensor) -> Tensor:
    return torch.arange(1, size + 1, dtype=like.dtype, device=like.device).cos()


def _state(module: nn.Module, *, lasting: bool = False) -> list[Any]:
    """What a layer may read beside its inputs.

    Args:
        lasting: what does not change by itself from step to step, as parameters do and what a forward keeps.

    Numbers, switches and words by their values, also those in lists; tensors by who they are and how often they were
    written to; other attributes by who they are.
    """
    found: list[Any] = []
    for m in module.modules():
        found += [_seen(x, lasting) for name, x in vars(m).items() if name not in _OF_EVERY_MODULE]
        found += map(_version, m._buffers.values())
    return found if lasting else [*found, *map(_version, module.parameters())]


def _seen(x: Any, lasting: bool, within: bool = False) -> Any:
    if type(x) in _NUMBERS:
        return x
    if not within and type(x) in (list, tuple, dict):
        some = itertools.islice(x.values() if isinstance(x, dict) else x, _MOST)
        return type(x), *(_seen(y, lasting, within=True) for y in some), *(() if lasting else (len(x), id(x)))
    if lasting:
        return type(x)
    return _version(x) if isinstance(x, Tensor) else id(x)


def _version(x: Tensor | None) -> Any:
    return id(x), None if x is None or x.is_inference() else x._version
