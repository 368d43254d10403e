"""What a layer's forward makes of its own parameters and leaves beside its outputs.

In an object that is no container of torch's pytrees (a distribution), in an attribute, a set, a closure, a global.

A layer without a rule that has layers inside gets its own parameters without history, as its samples' gradients come of
running it once more; a watch on them would see the gradients of its outputs, too, which go through it to the layers
inside. So what leaves beside these has no gradient that could be noticed, and is looked for on fake tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dpfast.taps import INERT, Shared, attributes_of, names_in, nodes_behind, tensors_in
from dpfast.trials.reached import bound_in

_DEPTH = 4
_STANDARD = frozenset(vars(nn.Module()))
_GATHERED = (list, tuple, set, frozenset)


def left_beside(module: nn.Module, forward: Callable[..., Any], output: Any, own: Sequence[Tensor]) -> str | None:
    """Where something is that was made of the module's own parameters, ``own``, in words.

    Args:
        forward: which has just given ``output``.
    """
    tapped = {id(x) for x in tensors_in(output)}
    places: dict[str, Any] = {f"in what it returns, {type(output).__name__}": output}
    kept = {name: x for name, x in vars(module).items() if name not in _STANDARD and name != "forward"}
    places.update({f"in its attribute {name}": x for name, x in kept.items()})
    function = getattr(forward, "__func__", forward)
    if isinstance(function, types.FunctionType):
        known, names = function.__globals__, names_in(function.__code__)
        reached = {name: known[name] for name in names if name in known} | bound_in(function)
        places.update({f"in {name}": x for name, x in reached.items() if isinstance(x, (Tensor, Mapping, *_GATHERED))})
    for place, held in places.items():
        mixed = held is output
        if any(id(x) not in tapped and _is_of(x, own, mixed=mixed) for x in _tensors(held, _DEPTH, set())):
            return place
    return None


def _is_of(x: Tensor, own: Sequence[Tensor], *, mixed: bool) -> bool:
    """Whether gradients of x come to these; without ``mixed``, to these alone: what has others' is guarded where it is
    kept."""
    if isinstance(x, Shared):
        return x.requires_grad and any(source.value is y for source in x.sources for y in own)
    if not x.requires_grad:
        return False
    ends = [end for node in nodes_behind([x.grad_fn]) if (end := getattr(node, "variable", None)) is not None]
    found = [any(end is y for y in own) for end in ends]
    return any(found) if mixed else bool(found) and all(found)


def _tensors(x: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif depth and id(x) not in seen and not isinstance(x, (nn.Module, type, types.ModuleType)):
        seen.add(id(x))
        for y in _inside(x):
            yield from _tensors(y, depth - 1, seen)


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, Mapping):
        yield from list(x.values())
    elif isinstance(x, _GATHERED):
        yield from list(x)
    elif isinstance(x, types.FunctionType):
        yield from bound_in(x).values()
    elif not isinstance(x, INERT):
        yield from attributes_of(x).values()
