"""The forward passes of tapped models that run in each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpfast.arithmetic import is_traced
from dpfast.taps import kind_here
from dpfast.trials import number_of_entries


def storage(x: Tensor) -> int:
    if is_traced():
        return x.untyped_storage()._cdata  # without memory, all addresses are 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor subclass without storage of its own
        return id(x)


def _laid_out(x: Tensor) -> Any:
    return (x.shape, x.stride()) if x.layout is torch.strided else ()


def num_samples(inputs: Any, leaves: Iterable[Any], dim: int) -> int | None:
    """How many samples the first tensor of a model's inputs has, or where none has that dimension, the first list or
    array; None where there is none of these either.

    Args:
        inputs: (args, kwargs). leaves: what is in them.
    """
    sizes = (
        int(x.batch_sizes[0]) if isinstance(x, PackedSequence) else x.shape[dim]
        for x in leaves
        if isinstance(x, PackedSequence) or (isinstance(x, Tensor) and x.dim() > dim)
    )
    n = next(sizes, None)
    return number_of_entries(inputs, dim) if n is None else n


class Pass(NamedTuple):
    """One forward pass of a tapped model.

    Attributes:
        size: how many samples it has. units, kind: whose they are, and of which kind its inputs. valid: (N,) bool,
            which of them are no padding, where some may be. graph: stands for what autograd keeps of it, if anything.
    """

    size: int | None
    units: Any
    kind: Any
    valid: Tensor | None
    graph: Any


class Running(threading.local):
    """The forward passes that run in this thread, of each model innermost last."""

    def __init__(self) -> None:
        self.passes: dict[int, list[Pass]] = {}
        self.inputs: dict[int, Any] = {}  # of the model that was last called, by their memory: how they are laid out

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """A model is being called with these."""
        self.inputs = {storage(x): _laid_out(x) for x in tensors}

    def is_input(self, x: Tensor, *, whole: bool) -> bool:
        """Whether it is one of them, or with ``whole`` False a view of one."""
        found = self.inputs.get(storage(x))
        return found is not None and (not whole or found == _laid_out(x))

    def here(self, model: object) -> Pass | None:
        """That of the model which runs in this thread, where it is none that a backward pass repeats."""
        passes = self.passes.get(id(model))
        return passes[-1] if passes else None

    def push(self, model: object, size: int | None, units: Any, valid: Tensor | None, graph: Any) -> None:
        self.passes.setdefault(id(model), []).append(Pass(size, units, kind_here(model), valid, graph))

    def pop(self, model: object) -> Pass | None:
        """None where the forward was refused before it began."""
        passes = self.passes.get(id(model))
        if passes is None:
            return None
        ended = passes.pop()
        if not passes:
            del self.passes[id(model)]
        return ended


running = Running()
