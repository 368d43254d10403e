"""Layers that are alike wait for each other: one call of their rule for all.

A small layer costs what its calls cost, and its rule, norm and clipped sum are some forty of them. What such layers
have caught stands together as samples of one layer instead, up to :data:`AT_ONCE`; then their rule is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.arithmetic import RowNorms, exact_arithmetic, ops
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.factors import Alike, Factor, Recipe, wait_as_factors
from dpfast.taps import Activations, Record, find_likeness

SMALL = {"cpu": 2**16, "cuda": 2**20}
"""Bytes of an input or a gradient up to which a layer waits: on a CPU copies of more would not stay in the caches, and
new memory costs page faults; a GPU copies so many in less than a launch takes."""

AT_ONCE = {"cpu": 2**19, "cuda": 2**26}
"""Bytes that wait for one call, at most, so that little is held longer than needed and what is made of it stays in the
caches."""

ROOM = 2**20
"""Bytes of gradients that a step keeps where their inputs would be less: in steps of this size calls take the time."""

_MOST_RECIPES = 1024

_recipes: dict[Hashable, Recipe] = {}
"""By what layers have in common, and what the arithmetic's ways depend on beside."""

FactorsOf = Callable[[Record, Activations, Any], Mapping[nn.Parameter, Factor]]


class Seen(NamedTuple):
    """What one layer has caught, and the versions of the tensors then."""

    record: Record
    activations: Tensor
    backprops: Tensor
    versions: tuple[int, int]


class Deferred:
    """Of one step.

    Args:
        factors_of: asks a record's rule.
        gathered: parameters whose factors the mode has.
        row_norms: of the step.
    """

    def __init__(self, factors_of: FactorsOf, gathered: Mapping[nn.Parameter, Any], row_norms: RowNorms):
        self._factors_of = factors_of
        self._gathered = gathered
        self._row_norms = row_norms
        self._queues: dict[Hashable, list[Seen]] = {}
        self._taken: list[tuple[list[nn.Parameter], Alike]] = []
        self._waiting: set[int] = set()
        self._room = ROOM
        self._circumstances: tuple[object, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a layer with that parameter waits, or has waited."""
        return id(parameter) in self._waiting  # which the step's records keep alive

    def takes(self, record: Record, activations: Tensor, backprops: Tensor) -> bool:
        """Whether the layer, of one input and one output, is one that waits; then it does."""
        key = _likeness(record, activations, backprops)
        if key is None:
            return False
        numbers = list(map(id, record.parameters))
        if not self._waiting.isdisjoint(numbers):
            return False
        if self._gathered and any(p in self._gathered for p in record.parameters):
            return False
        queue = self._queues.get(key)
        if queue is None:
            if wait_as_factors(activations, backprops):
                return False
            queue = self._queues[key] = []
        self._waiting.update(numbers)
        queue.append(Seen(record, activations, backprops, (activations._version, backprops._version)))
        if (len(queue) + 1) * (activations.nbytes + backprops.nbytes) > AT_ONCE[activations.device.type]:
            self._take(key)
        return True

    def take(self) -> list[tuple[list[nn.Parameter], Alike]]:
        """All that wait or have waited: a parameter of each layer, and their factor."""
        for key in list(self._queues):
            self._take(key)
        taken, self._taken = self._taken, []
        return taken

    def _take(self, key: Hashable) -> None:
        seen = self._queues.pop(key)
        first = seen[0].record
        for record, a, b, versions in seen:
            if (a._version, b._version) != versions:
                raise StateError(
                    f"{record.tap.layer}: its input, or the gradient at its output, was written to while the backward "
                    "pass went on; write to a copy"
                )
        with self._row_norms, exact_arithmetic():
            joined = _joined([s.activations for s in seen]), _joined([s.backprops for s in seen])
            found = self._made(key, first, *joined, len(seen))
        for place, (parameter, alike) in enumerate(zip(first.parameters, found, strict=True)):
            layers = [s.record.parameters[place] for s in seen]
            if any(p.shape != parameter.shape for p in layers):
                raise StateError(f"{first.tap.layer}: layers of one shape have parameters of several")
            self._taken.append((layers, alike))

    def _made(self, key: Hashable, first: Record, a: Tensor, b: Tensor, layers: int) -> list[Alike]:
        """Of each parameter of the layers that have caught these, one layer's samples after the other's."""
        if self._circumstances is None:
            self._circumstances = ops.circumstances()
        now = (key, self._circumstances)
        recipe = _recipes.get(now)
        if recipe is not None:
            found = recipe.made(a, b, layers, self._room)
            self._room -= sum(alike.beyond for alike in found)
            return found
        activations = Activations([a])
        activations.layer = first.tap.layer
        factors = self._factors_of(first, activations, (b,))
        for parameter in first.parameters:
            if parameter not in factors or factors[parameter].shape != parameter.shape:
                raise UnsupportedModuleError(f"{first.tap.layer}: its rule does not give what it gives one layer alone")
        in_order = [factors[parameter] for parameter in first.parameters]
        if first.rule is not None and first.rule.__module__.startswith("dpfast.rules."):  # others may look at values
            recipe = Recipe.learned(in_order, a, b)
            if recipe is not None and len(_recipes) < _MOST_RECIPES:
                _recipes[now] = recipe
        return [Alike(factor, layers) for factor in in_order]


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _likeness(record: Record, a: Tensor, b: Tensor) -> Hashable:
    """What layers that stand together have in common; None for one that does not wait."""
    tap, rule = record.tap, record.rule
    if rule is None or record.as_is or record.place or record.picked or tap.batch_dim or tap.folded:
        return None
    like = find_likeness(rule, tap.module)
    if like is None:
        return None
    uses = record.uses
    for p in record.parameters:
        if uses is None or uses[id(p)] != 1 or not p.requires_grad:
            return None
    shape_a, shape_b, device = a.shape, b.shape, b.device
    most = SMALL.get(device.type, 0)
    if a.nbytes > most or b.nbytes > most or not (a.is_contiguous() and b.is_contiguous()):
        return None
    if a.device != device or not shape_b or shape_a[:1] != shape_b[:1] or not shape_b[0]:
        return None
    own = tap.module._parameters.items()  # by name: one that was deleted and set again stands last
    trainable = tuple([name for name, p in own if p is not None and p.requires_grad])
    stream = torch.cuda.current_stream(device) if b.is_cuda else device
    return rule, like, trainable, len(record.parameters), shape_a, shape_b, a.dtype, b.dtype, stream
