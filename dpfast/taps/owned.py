"""What a tap at a module answers for beside the module itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dpfast.taps.registry import find_fault, owns_children


def owned_modules(module: nn.Module, whole: bool | None = None) -> list[nn.Module]:
    """The module and those below it that have no forward of their own to be caught at: lists and dicts of parameters
    and parametrizations, or the whole subtree where one rule answers for it (``whole``, where that is known)."""
    if not module._modules:  # most layers
        return [module]
    if owns_children(module) if whole is None else whole:
        return list(_with_children(module, {}).values())
    return [m for _, m in _owned(module)]


def _with_children(module: nn.Module, found: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """``found`` and the subtree, by number, in the order of ``named_modules``."""
    found[id(module)] = module
    for child in module._modules.values():
        if child is not None and id(child) not in found:
            _with_children(child, found)
    return found


def has_something_to_tap(module: nn.Module) -> bool:
    """Parameters of its own, or a reason to fail."""
    return any(m._parameters for m in owned_modules(module)) or find_fault(module) is not None


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of :func:`owned_modules`, by their names in the module."""
    return {
        f"{prefix}{name}": p
        for prefix, m in _owned(module)
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad
    }


def _owned(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if owns_children(module):
        yield from ((f"{name}." if name else "", m) for name, m in module.named_modules())
        return
    yield "", module
    for name, child in module._modules.items():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)) or (
            name == "parametrizations" and is_parametrized(module)
        ):
            inside = child.named_modules()  # type: ignore[union-attr]  # these are never None
            yield from ((f"{name}.{inner}." if inner else f"{name}.", m) for inner, m in inside)
