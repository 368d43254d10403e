"""Layers that are alike wait for each other: one call of their rule for all.

A small layer costs what its calls cost, and its rule, norm and clipped sum are some forty of them. What such layers
have caught stands together as samples of one layer instead, up to :data:`AT_ONCE`; then their rule is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.arithmetic import RowNorms, exact_arithmetic
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.factors import Alike, Factor, wait_as_factors
from dpfast.taps import Activations, Record, find_likeness

SMALL = {"cpu": 2**16, "cuda": 2**20}
"""Bytes of an input or a gradient up to which a layer waits: on a CPU copies of more would not stay in the caches, and
new memory costs page faults; a GPU copies so many in less than a launch takes."""

AT_ONCE = {"cpu": 2**19, "cuda": 2**26}
"""Bytes that wait for one call, at most, so that little is held longer than needed and what is made of it stays in the
caches."""

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
            activations = Activations([_joined([s.activations for s in seen])])
            activations.layer = first.tap.layer
            factors = self._factors_of(first, activations, (_joined([s.backprops for s in seen]),))
            for place, parameter in enumerate(first.parameters):
                factor = factors.get(parameter)
                if factor is None or factor.shape != parameter.shape:
                    raise UnsupportedModuleError(
                        f"{first.tap.layer}: its rule does not give what it gives one layer alone"
                    )
                layers = [s.record.parameters[place] for s in seen]
                if any(p.shape != parameter.shape for p in layers):
                    raise StateError(f"{first.tap.layer}: layers of one shape have parameters of several")
                self._taken.append((layers, Alike(factor, len(seen))))


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
    for p in record.parameters:
        if not (p.requires_grad and record.is_only_use(p)):
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
