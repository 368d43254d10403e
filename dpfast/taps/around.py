"""Forwards that a package has put around a module's own, to bring inputs and outputs where they belong (``tp_plan`` of
transformers): what the module's own forward sees is caught within."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

_PACKAGE, _INNER = "transformers.distributed.", "original_forward"


def is_around(forward: Any, module: nn.Module) -> bool:
    """Whether it calls the forward of the module's class and changes inputs and outputs alone."""
    if not isinstance(forward, types.FunctionType) or not str(forward.__module__).startswith(_PACKAGE):
        return False
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    own = cells[_INNER].cell_contents if _INNER in cells else None
    return getattr(own, "__func__", None) is type(module).forward


def sees_its_own_heads(module: nn.Module) -> bool:
    """Whether every rank has the module's parameters whole, and gives them the gradients of its own heads alone
    (Qwen3's ``q_norm``)."""
    tapped = module.__dict__.get("forward")
    forward: Any = getattr(tapped, "before", tapped)
    return (
        forward is not None
        and is_around(forward, module)
        and forward.__qualname__.startswith("ReplicatedWithGradAllReduce.")
    )


def with_inner(forward: Any, inner: Callable[..., Any]) -> Any:
    """The same, which calls ``inner`` in the place of the module's own."""
    cells = zip(forward.__code__.co_freevars, forward.__closure__, strict=True)
    closure = tuple(types.CellType(inner) if name == _INNER else cell for name, cell in cells)
    return types.FunctionType(forward.__code__, forward.__globals__, forward.__name__, None, closure)


def without_its_own_sums(module: nn.Module) -> None:
    """Of one that :func:`sees_its_own_heads`: its parameters' gradients are not all-reduced, until its forward runs
    untapped again, which hangs up hooks for that."""
    forward: Any = module.forward
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    cells["is_already_hooked"].cell_contents.clear()
    for p in module.parameters(recurse=False):
        hooks: dict[int, Any] = p._post_accumulate_grad_hooks or {}
        for number in [n for n, hook in hooks.items() if str(hook.__module__).startswith(_PACKAGE)]:
            del hooks[number]
