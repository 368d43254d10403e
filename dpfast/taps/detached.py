"""A module's own code sees its parameters without their history, so autograd computes no gradient of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError

Shown = Callable[[nn.Parameter], Tensor]
"""What a module's own code gets in a parameter's place."""


class _Detached(threading.local):
    """Whose parameters come without their history in this thread, innermost last."""

    def __init__(self) -> None:
        self.parameters: list[tuple[dict[str, Any], Shown]] = []


_detached = _Detached()


class DetachableParameters(dict[str, Any]):
    """A module's ``_parameters``. Within :func:`detached_parameters` the module's own code, which asks by name, gets
    its parameters without their history, in that thread alone; whoever iterates (``parameters()``, ``state_dict()``,
    an optimizer, another thread's backward pass) gets the parameters themselves.

    Attributes:
        on_change: called with (self, name, value) when another value is put in. Copies do not have it.
        elsewhere: what other modules' code gets, that asks for them within the model's forward. Copies do not have it.
    """

    on_change: Callable[[DetachableParameters, str, Any], None] | None = None
    elsewhere: Shown | None = None

    def __reduce__(self) -> Any:
        return DetachableParameters, (dict(self),)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self.on_change is not None:
            self.on_change(self, name, value)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        for own, shown in _detached.parameters:  # empty but within a tapped forward
            if own is self:
                return None if value is None else shown(value)
        return value if self.elsewhere is None or value is None else self.elsewhere(value)


def run_detached(parameters: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, to which one module's parameters come without their history."""
    stack = _detached.parameters
    before = len(stack)
    stack.append((parameters, Tensor.detach))
    try:
        return function(*args)
    finally:
        del stack[before:]


class detached_parameters:
    """Within it the modules' code sees their parameters without their history, or what ``shown`` makes of them. No
    generator, because every layer enters it."""

    def __init__(self, modules: Sequence[nn.Module], shown: Shown = Tensor.detach):
        self._added = [(m._parameters, shown) for m in modules]

    def __enter__(self) -> None:
        self._stack = _detached.parameters
        self._before = len(self._stack)
        self._stack += self._added

    def __exit__(self, *_: object) -> None:
        del self._stack[self._before :]


def wants_gradients(said: str) -> bool:
    """Whether a forward has failed because there were none that it takes itself (``torch.autograd.grad`` within it)."""
    return "does not require grad" in said


def say_what_it_wants(layer: str, error: RuntimeError) -> None:
    """Raises UnsupportedModuleError where the layer's forward has failed for these."""
    if type(error) is RuntimeError and wants_gradients(str(error)):
        raise UnsupportedModuleError(
            f"{layer}: its forward takes gradients itself ({error}), and its parameters come to it without their "
            "history, as it brings samples together, or not all that it does with them is known by samples. Take them "
            "of a copy for each sample (self.w.expand(len(x), *self.w.shape)), and from each sample's own loss; or "
            "freeze its parameters"
        ) from error
