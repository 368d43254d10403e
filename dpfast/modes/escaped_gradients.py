"""Nothing escapes: gradients may reach parameters from taps alone, and any other gradient is an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, compress
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpfast.errors import EscapedGradientError


class Trainable:
    """A model's trainable parameters, as ``parameters()`` has them, one that is there twice twice; that takes several
    times as long, and this is asked twice in each step."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules: list[nn.Module] = []
        self._seen: list[nn.Module | None] = []  # their children, then

    def __call__(self) -> list[nn.Parameter]:
        """Those of now."""
        children = list(chain.from_iterable(map(dict.values, map(_children, self._modules))))
        if children != self._seen or not self._modules:  # modules are equal where they are the same
            self._modules = list(self._model.modules())
            self._seen = list(chain.from_iterable(map(dict.values, map(_children, self._modules))))
        of_all = chain.from_iterable(map(dict.values, map(_parameters, self._modules)))
        found = [p for p in of_all if p is not None]
        return list(compress(found, map(_is_trained, found)))


# Without a line of Python for each.
_children, _parameters = attrgetter("_modules"), attrgetter("_parameters")
_is_trained: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # torch's stubs have a bool


class Guards:
    """A hook on each trainable parameter of a model that refuses gradients that do not come from taps.

    Args:
        is_fine: asked when a gradient arrives.
    """

    def __init__(self, model: nn.Module, is_fine: Callable[[nn.Parameter, Tensor], bool]):
        self._model = model
        self.trainable = Trainable(model)
        self._is_fine = is_fine
        self._handles: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}  # by id, which the parameter itself keeps
        self._seen: list[int] = []
        self._trainable = b""

    def set(self) -> bytes:
        """On every parameter that is trainable now; asked again before each step, because that may change. Returns a
        byte for each of the model's parameters, whether it is."""
        found = self.trainable()
        seen = list(map(id, found))
        if not self._handles.keys() >= set(seen):
            for p in found:
                if id(p) not in self._handles:
                    self.guard(p)
        if seen != self._seen:
            self._seen, self._trainable = seen, bytes(p.requires_grad for p in self._model.parameters())
        return self._trainable

    def guard(self, parameter: nn.Parameter) -> None:
        """One that is not the model's own, but stands in for one while a pass runs."""
        self._handles[id(parameter)] = parameter, _register_first(parameter, partial(self._refuse, parameter))

    def drop(self) -> None:
        """Lets ordinary gradients reach the parameters."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _refuse(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        if grad is None or self._is_fine(parameter, grad):
            return
        name = next((n for n, p in self._model.named_parameters() if p is parameter), "of another model")
        raise EscapedGradientError(
            f"a gradient reached parameter {name} {tuple(parameter.shape)} without being clipped, or parted by "
            "samples: it is used outside its own module's forward (functionally by another module, in a penalty on the "
            "weights, or by another wrapped model). Call the module instead, register a rule for the module that uses "
            "it, or freeze it; weight decay belongs in the optimizer"
        )


def _register_first(parameter: nn.Parameter, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Before those that are there, which may change the gradient."""
    hooks: Any = parameter._backward_hooks or {}
    before = dict(hooks)
    hooks.clear()
    handle = parameter.register_hook(hook)
    assert parameter._backward_hooks is not None
    parameter._backward_hooks.update(before)
    return handle
