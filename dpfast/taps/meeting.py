"""Where what has no samples meets some: the operation, as its rule sees it (``rules.functional``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Factor, folded, merge
from dpfast.taps.activations import Activations
from dpfast.taps.layout import Rows
from dpfast.taps.shared import NO_WAY_BACK, Operation, Shared, met_in
from dpfast.taps.uses import told_apart


class Meeting:
    """An operation that brings Shared tensors together with samples; what its rule works with.

    Args:
        place: of the result's samples. n: how many.
        name: of its rule.

    Attributes:
        place: their dimension. folded: whether each has several rows there. together: whether these stand together.
    """

    def __init__(self, operation: Operation, place: int | Rows, n: int, name: str = ""):
        self.operation, self.n, self.name = operation, n, name
        self.folded = isinstance(place, Rows)
        # Of an order that is not known nothing runs but shapes, and empty batches.
        self.place, self.together = (place.dim, bool(place.together)) if isinstance(place, Rows) else (place, True)
        self.tap = operation.shared[0].tap

    def with_copies(self, rank: int) -> Any:
        """The operation's result, of ``rank`` dimensions, where it broadcasts its tensors."""

        def copies(x: Any) -> Any:
            if not isinstance(x, Shared):
                return x
            dim = self.place - (rank - x.value.dim())
            if dim >= 0 and x.value.shape[dim] != 1:
                raise UnsupportedModuleError(f"{x.tap.layer}: {tuple(x.value.shape)} has samples in dimension {dim}")
            return self._by_rows(x.copies(dim, self.n), max(dim, 0), rank)

        args = tuple(map(copies, self.operation.args))
        return self.operation.func(*args, **{k: copies(x) for k, x in self.operation.kwargs.items()})

    def _by_rows(self, copies: Tensor, dim: int, rank: int) -> Tensor:
        """A copy for each row, of one for each sample in that dimension, where samples have several rows."""
        if not self.folded:
            return copies
        sizes = [x.shape[self.place - rank] for x in self.operation.others if x.dim() >= rank - self.place]
        rows = [s for s in sizes if s != 1]
        if not sizes:
            raise UnsupportedModuleError(f"{self.tap.layer}: nothing tells how many rows a sample has")
        k = rows[0] // max(self.n, 1) if rows else 1
        within = copies.unsqueeze(dim + 1 if self.together else dim)
        shape = (self.n, k) if self.together else (k, self.n)
        return within.expand(*copies.shape[:dim], *shape, *copies.shape[dim + 1 :]).flatten(dim, dim + 1)

    def __call__(self, function: Callable[..., Any], factors: Callable[..., Any], inputs: Any, parameters: Any) -> Any:
        """``function(*inputs, *parameters)``, tapped as a layer is.

        Args:
            factors: ``factors(values, activations, backprops) -> {value: factor}`` of the parameters' values.
            inputs: tensors with samples. parameters: Shared, None, or others, which are left to autograd.
        """
        shared = [x for x in parameters if isinstance(x, Shared)]
        values = [x.value.detach() if isinstance(x, Shared) else x for x in parameters]
        if any(x.is_complex() for x in values if x is not None):
            raise UnsupportedModuleError(f"{self.tap.layer}: layers' rules are for real numbers")
        own = list({id(p): p for x in shared for source in x.sources for p in source.parameters}.values())
        of = told_apart([x.value if isinstance(x, Shared) else None for x in parameters])
        # Not the operation, which would live as long as autograd's graph.
        place, n, layer = self.place, self.n, self.tap.layer
        is_folded, together = self.folded, self.together

        def met(module: nn.Module, activations: Activations, backprops: Tensor) -> Mapping[Any, Factor]:
            if place:
                activations, backprops = activations.map(lambda x: x.movedim(place, 0)), backprops.movedim(place, 0)
            of_values = factors(of, activations, backprops)
            if is_folded:
                of_values = {x: folded(f, n, rows_together=together) for x, f in of_values.items()}
            found: dict[nn.Parameter, list[Factor]] = {}
            for x, value in zip(parameters, of, strict=True):
                if isinstance(x, Shared) and value not in of_values:
                    raise UnsupportedModuleError(NO_WAY_BACK.format(layer))
                for parameter, factor in x.factors(of_values[value]).items() if isinstance(x, Shared) else ():
                    found.setdefault(parameter, []).append(factor)
            return {parameter: merge(several) for parameter, several in found.items()}

        met.__name__ = self.name
        output = function(*inputs, *values)
        tapped = self.tap.tapped(output, (tuple(inputs), {}), own, fresh=True, rule=met, as_is=True)
        return met_in(Rows(place, together) if is_folded else place, tapped)
