"""What one forward pass of a copy shows, and the backward passes through it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dpfast.taps.fingerprints import Prints
from dpfast.taps.layout import Rows
from dpfast.taps.nodes import ends_among, nodes_behind
from dpfast.taps.picks import Routes

Key = tuple[int, Any]
"""The number of a tap and the rank of its output; None: of pieces."""


class Caught(NamedTuple):
    """A tap's output. Not the tensor, which in most layers nobody else would keep.

    Attributes:
        edge: where its gradient comes by. handle: of our hook on it. hooks: all that are on it.
    """

    key: Key
    edge: GradientEdge
    handle: RemovableHandle
    hooks: Any


class Run(NamedTuple):
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
        met: where operations on what has no samples, by their ways, have those that it meets.
        routes: where rows were picked.
        grads: as calls, of the gradients at the taps' outputs in a backward pass; empty where none ran. losses: the
            same of each output that has no samples, by the output's number. caught: the taps' outputs, until then.
            running: not empty while these passes run. given, arrived: what has come in the pass of now, by the number
            of what was caught, and by its key. failed: why no backward pass ran.
        keeps: not empty where it has changed what modules hold.
        counted: of each sequence that is packed, how long samples are, by sample, where the model counts that.
    """

    calls: dict[Key, list[Any]]
    order: dict[Key, int]
    outputs: list[dict[int, Tensor]]
    lengths: set[int | None]
    packed: list[str]
    reordered: set[Key]
    met: dict[Key, int | Rows]
    routes: list[Routes]
    grads: dict[Key, list[Tensor]]
    losses: dict[int, dict[Key, list[Tensor]]]
    caught: list[Caught]
    running: list[bool]
    given: dict[int, Tensor]
    arrived: dict[Key, list[Tensor]]
    held: list[str]
    failed: list[Exception]
    keeps: list[bool]
    counted: list[list[int]]

    @classmethod
    def begun(cls) -> Run:
        """Nothing is noted yet."""
        return cls({}, {}, [], set(), [], set(), {}, [], {}, {}, [], [], {}, {}, [], [], [], [])

    def note_grad(self, key: Key, prints: Prints, grad: Tensor) -> None:
        """A hook on a tap's output."""
        self.arrived.setdefault(key, []).append(prints.of_gradient(grad))

    def catch(self, key: Key, prints: Prints, x: Tensor) -> None:
        """A tap's output, to which gradients are to come."""
        note = functools.partial(self._note_given, len(self.caught), key, prints)
        handle = x.register_hook(note)
        self.caught.append(Caught(key, get_gradient_edge(x), handle, x._backward_hooks))

    def _note_given(self, number: int, key: Key, prints: Prints, grad: Tensor) -> None:
        if self.running:  # and no pass of the model's own, within its forward
            self.given[number] = prints.of_gradient(grad)
            self.arrived.setdefault(key, []).append(self.given[number])


def backwards(run: Run, outputs: Sequence[Tensor], losses: dict[int, Tensor], to_leaves: bool) -> None:
    """Backward passes: from what the model returns by samples, where it returns that, of a loss whose gradient at each
    entry depends on that entry alone; and from each output that has no samples, of the sum of its entries: what becomes
    of one does not depend on how many there are, as of rows that were picked.

    Args:
        to_leaves: gradients may come to the copy's parameters.
    """
    # The cosine, and nothing where there is none.
    own = [x.detach().cos().nan_to_num_(0.0) for x in outputs]
    passes: list[tuple[int | None, Any, Any]] = [(None, outputs, own)] if outputs else []
    passes += [(i, [x], [torch.ones_like(x)]) for i, x in losses.items()]
    leaves_some = to_leaves and _in_reentrant_checkpoint([*outputs, *losses.values()])
    # Of these alone are gradients asked for: others are on the way to them, and would all be held until the end.
    keys, ends = [x.key for x in run.caught], ends_among([x.edge for x in run.caught])
    for x in run.caught:  # behind hooks of the model's own on the same output, which may mix samples
        x.hooks[x.handle.id] = x.hooks.pop(x.handle.id)
    run.running.append(True)
    try:
        for i, some, grads in passes if keys or leaves_some else ():
            again = i != passes[-1][0]
            run.arrived.clear()
            run.given.clear()
            if leaves_some:
                torch.autograd.backward(some, grads, retain_graph=again)
                found = dict(run.arrived)
            else:
                torch.autograd.grad(some, ends, grads, allow_unused=True, retain_graph=again)
                found = {}
                for number, key in enumerate(keys):
                    found.setdefault(key, []).append(run.given.get(number, torch.zeros(0)))
            (run.grads if i is None else run.losses.setdefault(i, {})).update(found)
    except Exception as error:  # whatever somebody's functions raise
        run.failed.append(error)
        run.grads.clear()
        run.losses.clear()
    for x in run.caught:  # it may be somebody's own
        x.handle.remove()
    for noted in (run.caught, run.running, run.given, run.arrived):
        noted.clear()


def _in_reentrant_checkpoint(outputs: Sequence[Tensor]) -> bool:
    """Whether some of what was computed was, whose gradients ``torch.autograd.grad`` does not give."""
    nodes = nodes_behind(x.grad_fn for x in outputs)
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)
