"""Which tensors depend on the model's inputs, in one forward pass on fake tensors.

A tensor whose shape does not follow the batch may have been made of its samples all the same (their mean). What a layer
makes of such a one is no sample's and not without samples either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHAPES_ALONE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")


class Dependence(TorchDispatchMode):
    """Follows the inputs through every operation that runs within it, by the memory that results stand in.

    Args:
        inputs: those of the model.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self._storages: dict[int, Any] = {}  # kept, so that no other gets the number of one
        for x in inputs:
            self._add(x)

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._storages

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._storages[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x in self for x in tree_leaves((args, kwargs))):
            name = func._schema.name.rpartition("::")[2]
            if not name.endswith(_SHAPES_ALONE):
                for x in tree_leaves(output):
                    if isinstance(x, Tensor):
                        self._add(x)
                if name.endswith("_"):  # what it changes
                    self._add(args[0])
        return output
