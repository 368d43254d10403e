"""The forward passes of tapped models that run in each thread."""

from __future__ import annotations

import threading

from torch import Tensor


def storage(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor subclass without storage of its own
        return id(x)


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
