"""The forward passes of tapped models that run in each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpfast.arithmetic import is_traced


def storage(x: Tensor) -> int:
    if is_traced():
        return x.untyped_storage()._cdata  # without memory, all addresses are 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor subclass without storage of its own
        return id(x)


def num_samples(leaves: Iterable[Any], dim: int) -> int | None:
    """How many samples the first tensor of a model's inputs has; None where none has that dimension."""
    sizes = (
        int(x.batch_sizes[0]) if isinstance(x, PackedSequence) else x.shape[dim]
        for x in leaves
        if isinstance(x, PackedSequence) or (isinstance(x, Tensor) and x.dim() > dim)
    )
    return next(sizes, None)


class Running(threading.local):
    """The batch sizes of the forward passes that run in this thread, innermost last."""

    def __init__(self) -> None:
        self.sizes: dict[int, list[int | None]] = {}
        self.inputs: set[int] = set()

    def push(self, model: object, size: int | None) -> None:
        self.sizes.setdefault(id(model), []).append(size)

    def pop(self, model: object) -> int | None:
        sizes = self.sizes[id(model)]
        size = sizes.pop()
        if not sizes:
            del self.sizes[id(model)]
        return size


running = Running()
