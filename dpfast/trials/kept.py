"""What the modules of a model hold, and whether a forward pass has changed it."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps import Tap, TappedForward, attributes_of, is_written
from dpfast.trials.reached import bound_in, is_of_library

_DEPTH = 6  # of objects in objects
_OTHERS = ("dpfast.", "opacus.", "torch.")  # whose methods hang on modules as hooks, and count
_CONTAINERS = {dict, list, set, tuple, collections.OrderedDict}
_COMPARED = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_HOLD_NOTHING = (Tap, type, types.ModuleType, types.FunctionType, TappedForward)
_VALUES = (int, float, complex, str, bytes)

Held = dict[str, tuple[Any, int, Any]]
"""Tensors, values and hashes of arrays by names, the tensors' versions, and what tells that one was written to: a copy,
or sums."""


def held(model: nn.Module, outside: Iterable[tuple[str, Any]] = ()) -> Held:
    """The parameters, tensors and numbers that its modules hold; also in objects of somebody's own, and in modules that
    are none of its children (kept in a list).

    Args:
        outside: what else it keeps, with names.
    """
    found = Held()
    for name, p in model.named_parameters():
        found[name] = p, 0, _copy(p) if is_written(p) else None
    seen = set(map(id, model.modules()))
    outside = [*outside, *_in_hooks(model)]
    for path, x in (*_beside_parameters(model), *(y for some in outside for y in _parts(*some, seen, _DEPTH))):
        found[path] = x, *_state(x)
    return found


def _in_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What functions that hang on modules have for themselves: variables of closures, and copies' globals."""
    for path, module in model.named_modules():
        for number, hook in enumerate((*module._forward_pre_hooks.values(), *module._forward_hooks.values())):
            yield from _in_function(f"{path}, hook {number}", getattr(hook, "hook", hook), _DEPTH)


def _in_function(path: str, function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(function, types.FunctionType) or is_of_library(function) or not depth:
        return
    for name, x in bound_in(function).items():
        yield f"{path}, {name}", x
        yield from _in_function(path, x, depth - 1)


def beside_parameters(model: nn.Module) -> dict[str, Any]:
    """The tensors and values that :func:`held` finds beside parameters, by names."""
    return dict(_beside_parameters(model))


def made_by_autograd(model: nn.Module) -> list[Tensor]:
    """The tensors that it holds beside parameters and that are no leaves: of a pass before, or a weight of others."""
    return [x for _, x in _beside_parameters(model) if isinstance(x, Tensor) and not x.is_leaf]


def _beside_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen = set(map(id, model.modules()))
    for name, p in model.named_parameters():
        yield from _of_tensor(name, p, seen, _DEPTH)
    for name, module in model.named_modules():
        yield from _of_module(name, module, seen, _DEPTH)


def _of_module(name: str, module: nn.Module, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    for attribute, value in (*module._buffers.items(), *vars(module).items()):
        empty = type(value) in _CONTAINERS and not value  # hooks of a module's, mostly
        if not empty and attribute not in ("_parameters", "_buffers", "_modules"):
            yield from _parts(f"{name}.{attribute}" if name else attribute, value, seen, depth)


def are_same(before: Held, now: Held) -> bool:
    """Whether nothing was put in the place of another, or written to."""
    return before.keys() == now.keys() and all(_is_same(x, now[name]) for name, x in before.items())


def _is_same(one: tuple[Any, int, Any], two: tuple[Any, int, Any]) -> bool:
    if not (isinstance(one[0], Tensor) or isinstance(two[0], Tensor)):
        return one[0] == two[0]
    return one[0] is two[0] and one[1] == two[1] and (one[2] is None or torch.equal(one[2], two[2]))


def _state(x: Any) -> tuple[int, Tensor | None]:
    return (x._version, _copy(x)) if isinstance(x, Tensor) else (0, None)


def _copy(x: Tensor) -> Tensor | None:
    """Writes through ``x.data``, or through NumPy, leave the version as it is. None of what is no plain tensor, or of
    numbers that torch does not compare."""
    plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta and x.dtype in _COMPARED
    if not plain:
        return None
    x = x.detach()
    return _sums_of_bits(x) if x.numel() > _LARGE and x.is_contiguous() else x.clone()


_LARGE = 2**20
_COLUMNS = 1021  # a prime, so that rows of something that change their places do not stand in the same ones


def _sums_of_bits(x: Tensor) -> Tensor:
    """In the place of a copy, which of a large table (quantised weights, a data set) would take its memory again."""
    octets = (torch.view_as_real(x) if x.is_complex() else x).view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        return x.clone()
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    rows = words[: len(words) // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    return torch.cat([rows.sum(0), words[rows.numel() :], octets[whole:].long()])


def _of_tensor(path: str, x: Tensor, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """What somebody has put into its attributes."""
    for name, value in getattr(x, "__dict__", {}).items() if depth else ():
        yield from _parts(f"{path}.{name}", value, seen, depth - 1)


def _parts(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, *_VALUES)):
        yield path, value
        if isinstance(value, Tensor):
            yield from _of_tensor(path, value, seen, depth)
        return
    if isinstance(value, types.MethodType):
        value = value.__self__
        if isinstance(value, nn.Module) or type(value).__module__.startswith(_OTHERS):
            return
    if hasattr(type(value), "tobytes"):  # NumPy's arrays and numbers; an object may answer for any name
        yield path, hash(value.tobytes())
        return
    if isinstance(value, _HOLD_NOTHING) or id(value) in seen or not depth:
        return
    if isinstance(value, nn.Module):
        yield from ((f"{path}.{name}", p) for name, p in value.named_parameters())
        for name, module in value.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield from _of_module(f"{path}.{name}" if name else path, module, seen, depth - 1)
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, collections.deque)):
        inner = [(f"{path}[{i}]", x) for i, x in enumerate(value)]
    elif isinstance(value, (set, frozenset)):
        inner = [(f"{path}{{{i}}}", x) for i, x in enumerate(value)]
    elif isinstance(value, dict):
        inner = [(f"{path}[{key!r}]", x) for key, x in value.items()]
    elif isinstance(value, functools.partial):
        inner = [(f"{path}.{key}", getattr(value, key)) for key in ("func", "args", "keywords")]
    else:
        inner = [(f"{path}.{key}", x) for key, x in attributes_of(value).items()]
    for name, x in inner:
        yield from _parts(name, x, seen, depth - 1)


def trained_beside(model: nn.Module) -> dict[str, Tensor]:
    """Leaves with a gradient that its modules hold and that are none of its parameters, by names: in attributes and
    buffers, containers and objects, and of modules that are none of its children (kept in a list)."""
    own = set(map(id, model.parameters()))
    return {
        path: x
        for path, x in _beside_parameters(model)
        if isinstance(x, Tensor) and x.is_leaf and x.requires_grad and id(x) not in own
    }


def made(model: nn.Module, before: dict[str, Any]) -> list[Tensor]:
    """What a forward pass has put beside parameters, in containers and objects too, and a loss may be made of."""
    of_before = set(map(id, before.values()))  # those of the pass before may have another name now
    found = [x for x in beside_parameters(model).values() if id(x) not in of_before]
    return [x for x in found if is_differentiable(x) and x.grad_fn is not None]


def made_outside(outside: Iterable[tuple[str, Any]], before: Sequence[Tensor] = ()) -> list[Tensor]:
    """The same of what it has put elsewhere, where nothing of that was there."""
    seen, there = set[int](), set(map(id, before))
    found = [x for name, value in outside for _, x in _parts(name, value, seen, _DEPTH) if id(x) not in there]
    return [x for x in found if is_differentiable(x) and x.grad_fn is not None]


def differentiable(model: nn.Module, outputs: Sequence[Any]) -> dict[str, Tensor]:
    """What a forward pass has left in attributes of its modules beside its outputs, and a loss may be made of, by their
    names."""
    there = set(map(id, outputs))
    return {
        f"{name}.{attribute}" if name else attribute: x
        for name, module in model.named_modules()
        for attribute, x in vars(module).items()
        if is_differentiable(x) and x.grad_fn is not None and id(x) not in there
    }


def is_differentiable(x: Any) -> bool:
    """Whether a loss may be made of it."""
    return isinstance(x, Tensor) and x.requires_grad and (x.is_floating_point() or x.is_complex())
