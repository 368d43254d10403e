"""What one forward pass of a copy shows, and the backward passes through it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dpfast.looks.lengths import Counts
from dpfast.looks.picks import NO_ROUTES, Picks, Routes
from dpfast.taps import Rows, Source, ends_among, in_backward, nodes_behind

Key = tuple[int, Any]
"""The number of a tap and the rank of its output; None: of pieces."""


class Beside(NamedTuple):
    """An output of a tap beside its first (a state, attention's weights), along one of its dimensions.

    Attributes:
        of: the tap's key. number: of the output, among those of all its calls.
    """

    of: Key
    number: int
    dim: int


class OfRows(NamedTuple):
    """What a tap gives of rows that the data has picked.

    Attributes:
        of: the tap's key. rows: how many there are to pick. width: of one.
    """

    of: Key
    rows: int
    width: int


CaughtOf = Key | Beside | OfRows


class _Prints(Protocol):
    def of_gradient(self, x: Tensor) -> Tensor: ...


class Caught(NamedTuple):
    """What a tap's output is made of, which the model itself does not get to see. Not the tensor, which in most layers
    nobody else would keep.

    Attributes:
        keys: one, or of an output beside the first one for each dimension.
        edge: where its gradient comes by. handle: of our hook on it.
    """

    keys: Sequence[CaughtOf]
    edge: GradientEdge
    handle: RemovableHandle


Grads = dict[CaughtOf, list[Tensor]]


@dataclass(eq=False)
class _Backward:
    """What has come in the pass that runs.

    Attributes:
        given: by the number of what was caught and its key. arrived: by its key.
    """

    given: dict[tuple[int, CaughtOf], Tensor] = field(default_factory=dict)
    arrived: Grads = field(default_factory=dict)


@dataclass(eq=False)
class Run:
    """What one forward pass shows.

    Attributes:
        calls: fingerprints along the samples' dimension, one each time that a tap runs; the shape where these do not
            fit.
        order: of the taps. lengths: the numbers of inputs that say how long packed sequences are; None: some come of
            no input.
        packed: layers that took packed sequences. reordered: of these, those that were followed
            in another order than the samples'.
        outputs: fingerprints of the model's outputs, along every dimension as long as the batch; behind them of what
            its modules keep in attributes (``held``, by their names).
        at_places: taps that ran on rows that were picked, each at its place among all.
        picked_ways: where operations on what has no samples, by their ways, have met rows that were picked.
        met: where operations on what has no samples, by their ways, have those that it meets.
        beside: fingerprints of outputs beside the first, along dimensions that may be the samples'.
        sources: what rows were picked out of.
        routes: where rows were picked. keeps: whether it has changed what modules hold.
        counted: how long samples may be (:class:`~dpfast.looks.lengths.Counts`). of_no_input: lengths of what is
            packed that come of none.
        grads: as calls, of the gradients at the taps' outputs in a backward pass, those beside the first and those of
            operations (``met``) too; empty where none ran. losses: the same of each output that has no samples, by the
            output's number. failed: why no backward pass ran.
    """

    calls: dict[Key, list[Any]] = field(default_factory=dict)
    order: dict[Key, int] = field(default_factory=dict)
    outputs: list[dict[int, Tensor]] = field(default_factory=list)
    lengths: set[int | None] = field(default_factory=set)
    packed: list[str] = field(default_factory=list)
    reordered: set[Key] = field(default_factory=set)
    at_places: set[Key] = field(default_factory=set)
    picked_ways: set[Key] = field(default_factory=set)
    picks: Picks | None = None  # while it runs
    met: dict[Key, int | Rows] = field(default_factory=dict)
    beside: dict[Beside, Tensor] = field(default_factory=dict)
    sources: dict[OfRows, list[Source]] = field(default_factory=dict)
    routes: Routes = NO_ROUTES
    keeps: bool = False
    held: list[str] = field(default_factory=list)
    counted: list[Counts] = field(default_factory=list)
    of_no_input: list[list[int]] = field(default_factory=list)
    grads: Grads = field(default_factory=dict)
    losses: dict[int, Grads] = field(default_factory=dict)
    failed: str | None = None
    _caught: list[Caught] = field(default_factory=list)  # the taps' outputs, until gradients have come to them
    _backward: _Backward | None = None  # while one runs

    def catch(self, prints: Mapping[Any, _Prints], x: Tensor) -> None:
        """A tap's output as the tap alone has it, to which gradients are to come: behind all hooks of the model's own
        on what it gets, and on autograd's nodes of that, as these may mix samples."""
        if in_backward() is not None:  # repeated in a checkpoint, where a pass of its own may follow
            x.register_hook(functools.partial(self._note_repeated, prints))
            return
        handle = x.register_hook(functools.partial(self._note_given, len(self._caught), prints))
        self._caught.append(Caught(list(prints), get_gradient_edge(x), handle))

    def _note_repeated(self, prints: Mapping[Any, _Prints], grad: Tensor | None) -> None:
        if self._backward is not None and grad is not None:  # see :meth:`_note_given`
            for key, some in prints.items():
                self._backward.arrived.setdefault(key, []).append(some.of_gradient(grad))

    def _note_given(self, number: int, prints: Mapping[Any, _Prints], grad: Tensor | None) -> None:
        """Of an operation with several outputs (cuDNN's recurrent layers, a chunk) autograd calls the hooks of all when
        a gradient comes to one: those of the others with None, as where a function behind gives none."""
        if self._backward is not None and grad is not None:  # and no pass of the model's own, within its forward
            for key, some in prints.items():
                self._backward.given[number, key] = some.of_gradient(grad)
                self._backward.arrived.setdefault(key, []).append(self._backward.given[number, key])

    def take_backwards(self, outputs: Sequence[Tensor], losses: dict[int, Tensor], to_leaves: bool) -> None:
        """Backward passes: from what the model returns by samples, where it returns that, of a loss whose gradient at
        each entry depends on that entry alone; and from each output that has none, of such a loss of its rows, or of
        the sum of its entries: what becomes of one does not depend on how many there are, as of rows that were picked.

        Args:
            to_leaves: gradients may come to the copy's parameters.
        """
        own = [_of_entries(x) for x in outputs]
        with torch.enable_grad():  # something is behind them, as a loss is: else torch's multi_grad_hooks would not run
            passes: list[tuple[int | None, Any, Any]] = [(None, list(map(_behind, outputs)), own)] if outputs else []
            passes += [(i, [_behind(x)], [_of_rows(x)]) for i, x in losses.items()]
        leaves_some = to_leaves and in_reentrant_checkpoint([*outputs, *losses.values()])
        # Of these alone are gradients asked for: others are on the way to them, and would all be held until the end.
        ends = ends_among([x.edge for x in self._caught])
        try:
            for i, some, grads in passes if ends or leaves_some else ():
                here, again = _Backward(), i != passes[-1][0]
                self._backward = here
                if leaves_some:
                    torch.autograd.backward(some, grads, retain_graph=again)
                    found = here.arrived
                else:
                    torch.autograd.grad(some, ends, grads, allow_unused=True, retain_graph=again)
                    found = {}
                    for number, key in ((i, key) for i, x in enumerate(self._caught) for key in x.keys):
                        found.setdefault(key, []).append(here.given.get((number, key), torch.zeros(0)))
                (self.grads if i is None else self.losses.setdefault(i, {})).update(found)
        except Exception as error:  # whatever somebody's functions raise
            self.failed = said_by(error)
            self.grads.clear()
            self.losses.clear()
        for x in self._caught:  # it may be somebody's own
            x.handle.remove()
        self._caught.clear()
        self._backward = None


def added_up(calls: Sequence[Tensor], shape: Sequence[int] | None = None) -> list[Tensor]:
    """Of rows at their places, which calls have which may change with the samples: of all of them, where there are
    any, or of those of a shape."""
    found = [x for x in calls if x.numel() and shape in (None, x.shape)]
    return [sum(found[1:], start=found[0])] if found else []


def _of_entries(x: Tensor) -> Tensor:
    """Each one's cosine, and nothing where there is none."""
    return x.detach().cos().nan_to_num_(0.0)


def _of_rows(x: Tensor) -> Tensor:
    """The same of several rows; of what has none, or one (a loss, a mean of the batch), of the sum of its entries."""
    return _of_entries(x) if x.dim() > 1 and len(x) > 1 else torch.ones_like(x)


def said_by(error: Exception) -> str:
    """In one line. Nothing else of an error is to be kept: it has its callers' frames, and with them a step's graph."""
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {said}"


def _behind(x: Tensor) -> Tensor:
    return x.view_as(x)


def in_reentrant_checkpoint(outputs: Sequence[Tensor]) -> bool:
    """Whether some of what was computed was, whose gradients ``torch.autograd.grad`` does not give."""
    nodes = nodes_behind(x.grad_fn for x in outputs)
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)


def equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def alike(one: Run, two: Run) -> bool:
    """Whether two forward passes gave the same."""
    return _are_same(one.calls, two.calls) and all(
        x.keys() == y.keys() and all(equal(x[d], y[d]) for d in x)
        for x, y in zip(one.outputs, two.outputs, strict=True)
    )


def gradients_alike(one: Run, two: Run) -> bool:
    """Whether their backward passes did."""
    losses = all(_are_same(grads, two.losses.get(i, {})) for i, grads in one.losses.items())
    return losses and _are_same(one.grads, two.grads)


def _are_same(one: Mapping[Any, list[Any]], two: Mapping[Any, list[Any]]) -> bool:
    return one.keys() == two.keys() and all(
        len(x) == len(two[key]) and all(map(equal, x, two[key])) for key, x in one.items()
    )
