"""How a layer's forward began and what it gave, where it runs again.

A layer without a rule runs again in the backward pass: with the numbers and buffers that it had when its forward began,
which may move them on (a temperature that falls, a power iteration), and for the rest with the attributes of then. What
it gives is compared with what it gave. No outputs are kept for that (what follows may change these in place, and they
take memory) but two numbers of each. Comparing these waits for a GPU: there it is done the first time, and where the
layer reads something else than it did, as far as that can be seen.
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

_writes: weakref.WeakKeyDictionary[nn.Module, dict[bytes, bool]] = weakref.WeakKeyDictionary()
"""Whether a layer's forward has been seen to write to its buffers, by which modules are in training: of large ones that
are only read, no copies are made."""

_FEW = 4096  # numbers, which are copied anyway: a layer may write to them now and then

_as_found: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""What layers read that lasts, as it was when they last gave the same twice."""


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Its own attributes that are numbers, switches or words."""
    return {name: x for name, x in vars(module).items() if type(x) in _NUMBERS and name not in _OF_EVERY_MODULE}


class Before:
    """What a layer that will run again holds when its forward begins.

    Attributes:
        numbers: numbers, switches and words of it and its children, by names, and the names of all that they have.
        buffers: copies of those that its forward writes to, by their names within it; until that has ended, of all that
            it may write to.
    """

    def __init__(self, module: nn.Module):
        modules, self._module = list(module.modules()), module
        self.numbers = [(m, numbers_of(m), frozenset(vars(m))) for m in modules]
        self._mode, found = bytes(m.training for m in modules), self._buffers()
        self._versions = {name: _version(b) for name, b in found.items()}
        may_write = _writes.get(module, {}).get(self._mode, True)
        self.buffers = {n: b.detach().clone() for n, b in found.items() if may_write or b.numel() <= _FEW}

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._module.named_buffers(remove_duplicate=False))

    def ended(self) -> None:
        """The forward has."""
        made = any(
            x is True and not began.get(name) for m, began, _ in self.numbers for name, x in numbers_of(m).items()
        )
        if made:  # a switch is on now: what was made once is there when it runs again
            self.numbers, self.buffers = [], {}
        now = self._buffers()
        written = {name for name, b in now.items() if _version(b) != self._versions.get(name)}
        written |= {name for name, b in self.buffers.items() if name in now and not _is_equal(b, now[name])}
        known = _writes.setdefault(self._module, {})
        known[self._mode] = bool(written) or known.get(self._mode, False)
        self.buffers = {name: b for name, b in self.buffers.items() if name in written}


def _is_equal(one: Tensor, two: Tensor) -> bool:
    """Not asked where it would be waited for, but for the version."""
    like = one.dtype == two.dtype and one.device == two.device
    told = one.is_meta or is_waited_for(one) or one.layout is not torch.strided or one.is_quantized
    return like and (told or torch.equal(one, two))


class Gave:
    """Of one run of a layer, made when its forward has ended.

    Attributes:
        rounding: of the outputs' dtypes, the coarsest.
        before: what the layer held when it began.
    """

    def __init__(self, module: nn.Module, outputs: Sequence[Tensor], before: Before):
        self.before = before
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


def before(module: nn.Module, rule: Callable[..., Any] | None) -> Before | None:
    """What a layer holds whose forward begins; None where it will not run again.

    Args:
        rule: of the layer; None: it has none.
    """
    return Before(module) if (rule is None or rule in _run_again) and not is_traced() else None


def gave(module: nn.Module, outputs: Sequence[Tensor], before: Before | None) -> Gave | None:
    """What is to be compared; None: nothing is."""
    if before is None:
        return None
    before.ended()
    if any(type(x) is not Tensor or x.layout != torch.strided for x in outputs):
        return None
    return Gave(module, outputs, before)


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
