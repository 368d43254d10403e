"""Nothing escapes: gradients may reach parameters through taps alone, and any other gradient is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpfast.errors import EscapedGradientError

_arriving: list[frozenset[nn.Parameter]] = []
"""The parameters whose gradients are being left now, one entry a pass."""


def leave_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Adds each to its ``p.grad`` by autograd, so that hooks on the parameters, DDP's too, see what came by taps."""
    if not parameters:
        return
    arriving = frozenset(parameters)
    _arriving.append(arriving)
    try:
        # As torch.autograd.backward(), which looks at each shape longer than all else here takes.
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(parameters),
            tuple(g.to(p.dtype) for p, g in zip(parameters, gradients, strict=True)),
            False,  # keep_graph
            False,  # create_graph
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    finally:
        _arriving.remove(arriving)


class Guards:
    """A hook on each trainable parameter of a model that refuses ordinary gradients.

    Args:
        active: asked when a gradient arrives; where it says no, the gradient passes.
    """

    def __init__(self, model: nn.Module, active: Callable[[], bool]):
        self._model = model
        self._active = active
        self._handles: dict[nn.Parameter, RemovableHandle] = {}

    def set(self) -> None:
        """On every parameter that is trainable now; asked again before each step, because that may change."""
        modules, seen = [self._model], set()
        while modules:  # as parameters(), which takes several times as long, and this runs in each step
            module = modules.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            modules.extend(module._modules.values())
            for p in module._parameters.values():
                if p is not None and p.requires_grad and p not in self._handles:
                    self._handles[p] = p.register_hook(partial(self._refuse, p))

    def drop(self) -> None:
        """Lets ordinary gradients reach the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _refuse(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        for arriving in _arriving:
            if parameter in arriving:
                return
        if grad is None or not self._active():
            return
        name = next((n for n, p in self._model.named_parameters() if p is parameter), "of another model")
        raise EscapedGradientError(
            f"a gradient reached parameter {name} {tuple(parameter.shape)} without being clipped: it is used outside "
            "its own module's forward (functionally by another module, or in a penalty on the weights). Call the "
            "module instead, register a rule for the module that uses it, or freeze it; weight decay belongs in the "
            "optimizer"
        )
