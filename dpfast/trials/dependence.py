"""Which tensors depend on the model's inputs, in one forward pass, and where samples are mixed.

A tensor whose shape does not follow the batch may have been made of its samples all the same (their mean). What a layer
makes of such a one is no sample's and not without samples either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast.taps import tensors_in

_SHAPES_ALONE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")


class Dependence(TorchDispatchMode):
    """Follows the inputs through every operation that runs within it, by the memory that results stand in.

    Args:
        inputs: those of the model. samples: those of them that follow the batch.
        size: of the batch. note: is told of all that operations give.

    Attributes:
        mixed: how often samples met what had been made of several of them, and of no one's own (their mean).
    """

    def __init__(
        self, inputs: Sequence[Tensor], samples: Sequence[Tensor], size: int, note: Callable[[list[Tensor]], None]
    ):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        # By memory: as long as there is a weak reference, no other has its number.
        self._of_inputs: dict[int, StorageWeakRef] = {}
        self._of_samples: set[int] = set()
        self._size, self._note = size, note
        self.mixed = 0
        for x in inputs:
            self._add(x, any(x is y for y in samples))

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._of_inputs

    def follows(self, x: Tensor) -> bool:
        """Whether its shape follows the batch."""
        return any(s and s % self._size == 0 for s in x.shape)

    def _add(self, x: Tensor, of_samples: bool) -> None:
        storage = x.untyped_storage()
        self._of_inputs[storage._cdata] = StorageWeakRef(storage)
        if of_samples:
            self._of_samples.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # fake tensors ask for a hundred shapes each time
            return self._noted(func, args, kwargs or {})

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        self._note(tensors_in(output))
        took = [x for x in tensors_in((args, kwargs)) if x in self]
        name = func._schema.name.rpartition("::")[2]
        if not took or name.endswith(_SHAPES_ALONE):
            return output
        made = tensors_in(output)
        made += [args[0]] if name.endswith("_") else []  # what it changes
        samples = [x for x in took if x.untyped_storage()._cdata in self._of_samples]
        for x in made:
            self._add(x, bool(samples))
        several = any(x.is_floating_point() and not self.follows(x) for x in samples)
        self.mixed += several and any(map(self.follows, made))
        return output
