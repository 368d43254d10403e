"""What a layer took, as rules find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpfast.taps.gave import Gave


class Activations(list[Any]):
    """A module's positional inputs, and in ``kwargs`` those that can only be passed by keyword."""

    gave: Gave | None = None  # what the layer made of them, where that is to be compared

    def __init__(self, values: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None):
        super().__init__(values)
        self.kwargs = dict(kwargs or {})
        self.batch_dim = 0  # where the module itself had its samples; here they are in front
        self.followed: list[bool] = []  # of each leaf of (positional, keyword): whether a gradient goes through it
        self.layer = ""  # as errors name it
        self.num_samples: int | None = None  # where it is known
        self.rows_together: bool | None = None  # where each has several rows: whether they stand together

    def map(self, function: Callable[[Any], Any]) -> Activations:
        """The same with ``function`` of every tensor."""
        raw = not self.kwargs and all(isinstance(x, Tensor) for x in self)  # nearly all: trees take their time
        found = Activations(*(map(function, self),) if raw else tree_map_only(Tensor, function, ([*self], self.kwargs)))
        found.__dict__.update(self.__dict__, kwargs=found.kwargs)
        if self.gave is not None:
            found.gave = self.gave.map(function)
        return found
