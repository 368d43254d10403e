"""What a forward of a tapped model is called with, what is to be noted of it, and how often its kind is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.arithmetic import in_cuda_graph
from dpfast.looks.learned import Learned, learned
from dpfast.taps import NO_BAGS, Bags, Structure, Tap
from dpfast.trials import Entries, Path, Trial, entries_in, given_whole, put_in

_LATER = frozenset({1, *(8**k - 1 for k in range(1, 9))})
"""Forwards after the first that are looked at, for what that did not show: a branch, random numbers, a weight that was
zero."""


def looks_again_at(forward: int) -> bool:
    """Whether that forward after the first is one to look at."""
    return forward in _LATER


class Called(NamedTuple):
    """What the forward that runs is called with.

    Attributes:
        inputs: (args, kwargs). leaves: what is in them, but in entries. dims: of each, those that may follow the batch.
            n: how many samples there are. entries: what is no tensor and has one for each, by where it is.
    """

    inputs: Any
    leaves: Sequence[Any]
    bags: Bags
    dims: list[set[int]]
    n: int
    entries: Mapping[Path, Entries | None]

    def again(self, first: Learned) -> tuple[Trial, list[int | None]]:
        """How a later look calls the model, and of each input the dimension of the samples."""
        trial = Trial(self.inputs, self.bags, self.entries, with_gradients=first.with_gradients)
        own, dims = len(trial.leaves) - len(trial.entries), list(first.dims)
        if len(dims) != len(trial.leaves):  # what has as many by accident
            dims = dims[:own] + [None] * len(trial.entries)
        return trial, dims

    def learned(self, receiver: Any, taps: Sequence[Tap], passes: int = 0) -> Learned:
        """What is told of a forward that runs, or has; or of one that comes so many passes later."""
        follow = [along(some, receiver.batch_dim) for some in self.dims]
        how = self.inputs, follow, self.n, self.bags, passes, self.entries
        found = learned(receiver.model, taps, *how)
        tables = any(isinstance(tap.module, nn.Embedding) for tap in taps)
        if found.told.why is None or found.bags is not None or not (tables and receiver.gives_batches):
            return found
        receiver.gives_batches = False  # where samples are folded, there are more rows than samples to meet
        without = learned(receiver.model, taps, *how)
        receiver.gives_batches = without.told.why is not None
        return found if receiver.gives_batches else without

    def in_front(self, samples: Sequence[int], receiver: Any) -> Called:
        """The same batch with these samples before the others; as it is where samples are bags in one row."""
        structure = Structure(self.inputs, whole=given_whole(self.entries))
        if self.bags is not NO_BAGS or len(structure.leaves) != len(self.dims):
            return self
        order = torch.tensor(list(dict.fromkeys((*samples, *range(self.n)))))
        leaves = [
            x.detach().index_select(dim, order.to(x.device))
            if (dim := along(some, receiver.batch_dim)) is not None
            else x
            for x, some in zip(structure.leaves, self.dims, strict=True)
        ]
        inputs = structure.unflatten(leaves)
        for path, x in self.entries.items():
            inputs = inputs if x is None else put_in(inputs, path, x.taken(order.tolist()).as_given())
        entries = entries_of(receiver, inputs, self.n, set(self.entries))
        return self._replace(inputs=inputs, leaves=leaves_but(entries, inputs), entries=entries)


def entries_of(receiver: Any, inputs: Any, n: int, known: set[Path]) -> dict[Path, Entries | None]:
    """In what the model is called with, of n samples. Where a table has bags, whose places are known by their numbers
    among all leaves, lists of tensors are of fields, and what is in the others stays among the leaves.

    Args:
        known: where there have been some in other batches; these are added.
    """
    found = entries_in(inputs, receiver.batch_dim, n, known)
    if found and any(isinstance(m, nn.EmbeddingBag) for m in receiver.model.modules()):
        found = {p: x for p, x in found.items() if x is None or not any(isinstance(y, Tensor) for y in x.leaves())}
        for x in found.values():
            if x is not None:
                x.given = None
    known.update(path for path, x in found.items() if x is not None and n > 1)
    return found


def leaves_but(entries: Mapping[Path, Entries | None], inputs: Any) -> list[Any]:
    """What the model is called with, where one leaf stands for what has entries."""
    return Structure(inputs, whole=given_whole(entries)).leaves


def along(dims: set[int], batch_dim: int) -> int | None:
    """Which of the dimensions that may follow the batch is taken for it."""
    return batch_dim if batch_dim in dims else min(dims, default=None)


class Due(NamedTuple):
    """What is to be noted if the forward runs.

    Attributes:
        kind: of its inputs, whatever is trainable. dims: of each input. look: whose looks; None: there are too many.
        why: it could not be looked at.
    """

    kind: tuple[Any, ...]
    dims: list[set[int]]
    look: tuple[Any, ...] | None
    why: str | None = None


class Looks:
    """At inputs of one kind.

    Attributes:
        due: how many more are to come at once. forwards: since the first. first: what that told. alone: they had one
            sample each, in whose place there is no other.
    """

    def __init__(self, due: int, first: Learned, alone: bool = False):
        self.due, self.first, self.alone, self.forwards = due, first, alone, 0

    def one_more(self, n: int) -> bool:
        """Whether another forward, of n samples, is one to look at: none that goes into a CUDA graph, where no value
        can be read."""
        if self.due == 0 and in_cuda_graph():
            return False
        self.forwards += 1
        if self.alone and n > 1:
            self.due, self.alone = max(self.due, 1), False
        return self.due > 0 or (looks_again_at(self.forwards) and bool(self.first.dims))
