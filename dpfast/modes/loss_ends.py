"""Where a loss's graph enters what the forward pass has made: the model's outputs, and tensors that it does not return,
kept in an attribute, by a hook, in an object of somebody's own.

Autograd numbers a thread's nodes one after the other, so those of a forward pass are known. Where its samples cannot be
told in what the loss takes of it (a number, rows of several positions, a thread that is not the loss's), the loss goes
on behind that for as long as it takes, to the layers at most, which know where their samples are.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpfast.errors import warn_caller
from dpfast.modes.cut_graph import Cut
from dpfast.taps import Leads, Rows, is_of_tap
from dpfast.trials import noise_like

_KEPT_ON_TRUST = (
    "the loss was made from {}, {}, and in which of its dimensions the batch's {} samples are is not known. That the "
    "loss is a sum or mean of samples' own losses is taken on trust: if it is not so, clipping bounds nothing "
    "(docs/layouts.md); keep it with the samples in a dimension of their own"
)
_KEPT = "a tensor of the model's that is no output of it (an attribute, a hook's, what an output was made from)"
REENTRANT = "CheckpointFunctionBackward"  # what is in one is not in the graph
_MARK = "dpfast_outputs"  # in the metadata of autograd's nodes, which live as long as their graph
_now = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # of autograd's nodes


class Looked(NamedTuple):
    """A forward pass whose loss is to be looked at.

    Attributes:
        whose: the number of each sample, or of its unit, whose samples may meet. batch_dim: where they are, mostly.
        nodes: autograd's numbers of its nodes, which are its thread's.
    """

    whose: tuple[int, ...]
    batch_dim: int
    nodes: range
    thread: int

    @classmethod
    def ended(cls, whose: Iterable[int], batch_dim: int, begun: int) -> Looked:
        return cls(tuple(whose), batch_dim, range(begun, _now()), threading.get_ident())

    @property
    def n(self) -> int:
        return len(self.whose)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Two halves of the samples (N,), by their numbers alone, as forward passes of fewer have the same ones.

        What mixes samples in a way that keeps one half as it is does not show there. The first are those whose number
        has an odd number of ones in its binary digits (the Thue-Morse sequence), which parts neighbours and those half
        a batch apart, but is its own reverse at 4, 16, 64 and 256 samples; the second is a hash, which is not.
        """
        number = torch.tensor(self.whose)
        mixed = (number + 2) * 0x1E3779B97F4A7C15  # int64 wraps
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        odd = torch.zeros(self.n, dtype=torch.bool)
        while bool(number.any()):
            odd ^= (number & 1).bool()
            number = number >> 1
        return odd, (mixed >> 37) & 1 == 1


class Output(NamedTuple):
    """One of a model's, or what it keeps.

    Attributes:
        tensor, hooks: and those on its gradient, which are for the step's; None where it is kept. name: in words.
        dims: where its samples may be; none where it is one number; None: not known. is_refused: its gradients are.
        rows: whether a sample's rows stand together, and how many of it there are; None: it has one.
    """

    tensor: weakref.ref[Tensor] | None
    hooks: Any
    name: str
    forward: Looked
    dims: Sequence[int] | None
    is_refused: bool = False
    rows: tuple[bool, int] | None = None

    @property
    def n(self) -> int:
        return self.forward.n

    def half(self, which: int) -> Tensor:
        """Of its rows, those of one of the forward pass's halves."""
        return self.of_rows(self.forward.halves()[which])

    def whose(self) -> Tensor:
        """The number of each row's sample, or of its unit."""
        return self.of_rows(torch.tensor(self.forward.whose))

    def of_rows(self, of_samples: Tensor) -> Tensor:
        if self.rows is None:
            return of_samples
        together, number = self.rows
        return of_samples.repeat_interleave(number) if together else of_samples.repeat(number)

    def told_by_layer(self, edge: GradientEdge) -> Output:
        """The same, where the layer that it is of knows that its samples are folded, with their rows."""
        node = cast(Any, edge.node)
        record = node.record if self.dims is None and is_of_tap(node) else None
        place = None if record is None else record.place if record.meets_in is None else record.meets_in
        if not isinstance(place, Rows) or place.together is None or edge.output_nr:
            return self
        shape = tuple(node._input_metadata[0].shape)
        size = shape[place.dim] if place.dim < len(shape) else 0
        fits = size > 0 and size % self.n == 0
        return self._replace(dims=[place.dim], rows=(place.together, size // self.n)) if fits else self


def marks(node: Any) -> dict[int, Output]:
    """The outputs, by number, of a node whose forward pass is to be looked at."""
    found: dict[int, Output] = node.metadata.get(_MARK, {})
    return found


def mark(x: Tensor, output: Output) -> None:
    node: Any = x.grad_fn
    node.metadata.setdefault(_MARK, {})[x.output_nr] = output


def unmark(node: Any) -> None:
    del node.metadata[_MARK]


def dims_of(shape: Sequence[int], some: Iterable[int], n: int) -> list[int] | None:
    found = [d for d in some if d < len(shape) and shape[d] == n]
    return found if found or math.prod(shape) == 1 else None


def find_ends(
    losses: Sequence[Tensor], marked: dict[Any, dict[int, Output]], forwards: Sequence[Looked]
) -> tuple[list[Any], dict[GradientEdge, Output]]:
    """The losses' own nodes, and where they enter what the forward passes made; a warning says where the samples there
    cannot be told.

    Args:
        marked: the outputs, by node and number.
    """
    search = _Search(marked, forwards)
    search.go_on(GradientEdge(loss.grad_fn, loss.output_nr) for loss in losses if loss.grad_fn is not None)
    asked: set[GradientEdge] = set()
    while new := {edge: x for edge, x in search.found.items() if x.tensor is None and x.dims and edge not in asked}:
        asked.update(new)
        new = {edge: x for edge, x in new.items() if x.rows is None}
        for edge in _mixed_before(new, marked):
            search.go_behind(edge)
    return list(search.own), search.found


class _Search:
    """From losses to their ends, of which it has found some, by nodes that are their own."""

    def __init__(self, marked: dict[Any, dict[int, Output]], forwards: Sequence[Looked]):
        self.found: dict[GradientEdge, Output] = {}
        self.own: dict[Any, None] = {}
        told = (node for node, some in marked.items() if any(x.dims is not None for x in some.values()))
        self._stops = Counter(dict.fromkeys(told, 2))  # how many ends are at a node
        self._marked, self._forwards = marked, forwards
        self._made_by, self._leads = _MadeBy(forwards), Leads(_is_last)

    def go_on(self, edges: Iterable[GradientEdge]) -> None:
        waiting = deque(edges)
        while waiting:
            edge = waiting.popleft()
            if edge in self.found or edge.node in self.own:
                continue
            is_own, output = self._of(edge)
            if output is not None:
                self.found[edge] = output
                self._stops[edge.node] += 1
            elif is_own:
                self.own[edge.node] = None
                waiting.extend(GradientEdge(x, number) for x, number in edge.node.next_functions if x is not None)

    def go_behind(self, edge: GradientEdge) -> None:
        """That is no end, where it can be gone through."""
        if not _is_last(edge.node) and self._stops[edge.node] == 1:
            del self.found[edge], self._stops[edge.node]
            self.own[edge.node] = None
            self.go_on(GradientEdge(x, number) for x, number in edge.node.next_functions if x is not None)

    def _of(self, edge: GradientEdge) -> tuple[bool, Output | None]:
        """Whether its node is the losses' own, and what it is an end of."""
        node = edge.node
        output, forward = self._marked.get(node, {}).get(edge.output_nr), self._made_by(node)
        last = _is_last(node) or self._stops[node] > 0
        if output is not None and (output.dims is not None or output.is_refused or last or not self._leads(node)):
            return False, output if output.is_refused else output.told_by_layer(edge)
        if output is not None:  # several samples are in one of its rows, or one in several
            return True, None
        if forward is None and is_of_tap(node):  # of a pass that is not looked at, and that no look may go through
            return False, Output(None, {}, _KEPT, self._forwards[0], None)
        if forward is None:
            return True, None
        if not self._leads(node):
            return False, None
        return True, _kept(edge, forward, self._marked, last=last)


def _is_last(node: Any) -> bool:
    """Whether nothing behind it can be gone through: a layer's, or a checkpoint's."""
    return is_of_tap(node) or type(node).__name__ == REENTRANT


class _MadeBy:
    """The forward pass that has made a node."""

    def __init__(self, forwards: Sequence[Looked]):
        self._forwards = [x for x in forwards if x.thread == threading.get_ident()]

    def __call__(self, node: Any) -> Looked | None:
        number = node._sequence_nr()
        found = next((x for x in self._forwards if number in x.nodes), None)
        if found is None and is_of_tap(node) and node.record.graph is not None:  # another thread's
            found = node.record.graph.looked
        return found


def _kept(edge: GradientEdge, forward: Looked, marked: dict[Any, dict[int, Output]], *, last: bool) -> Output | None:
    """None where its samples cannot be told and what it was made of may tell."""
    like: Any = edge.node._input_metadata[edge.output_nr]
    shape = tuple(like.shape)
    dims = None if like.dtype.is_complex else dims_of(shape, range(len(shape)), forward.n)
    if dims and is_of_tap(edge.node):
        dims = dims_in_layer(edge.node, edge.output_nr, forward.n)
    elif dims and dims != [forward.batch_dim]:
        dims = _told(edge, dims, forward, marked)
    if not dims and not last:
        return None
    found = Output(None, {}, _KEPT, forward, dims).told_by_layer(edge)
    if found.dims is None:
        warn_caller(_KEPT_ON_TRUST.format(_KEPT, shape, forward.n))
    return found


def dims_in_layer(node: Any, number: int, n: int) -> list[int] | None:
    """Where the samples are in an output of a layer, whose place is that of the first."""
    shape, record = tuple(node._input_metadata[number].shape), node.record
    some = dims_of(shape, range(len(shape)), n)
    if number and isinstance(record.tap.module, nn.RNNBase):  # the last states, (layers, N, ...) always
        return dims_of(shape, [1], n)
    if number and some and len(some) == 1:  # weights of an attention
        return some
    place = record.tap.batch_dim if record.place is None else record.place
    place = place if record.meets_in is None else record.meets_in
    return dims_of(shape, [place], n) if isinstance(place, int) else None


def _told(
    edge: GradientEdge, dims: list[int], forward: Looked, marked: dict[Any, dict[int, Output]]
) -> list[int] | None:
    """In which of the dimensions its samples are: where half of it comes of that half of the samples alone, in what it
    was made of."""
    ends = _behind([edge], forward, marked)
    found = [dim for dim in dims if ends and _stays_apart({edge: dim}, ends, forward)]
    if found or ends:
        return found or None
    return [forward.batch_dim] if forward.batch_dim in dims else dims


def _mixed_before(kept: dict[GradientEdge, Output], marked: dict[Any, dict[int, Output]]) -> list[GradientEdge]:
    """Those of which half comes of other samples too, in what they were made of: samples have met there, or are in no
    dimension of theirs. Asked of all at once, as nearly always none is."""
    found = []
    for forward in {x.forward for x in kept.values()}:
        dims = {edge: x.dims[0] for edge, x in kept.items() if x.forward == forward and x.dims}
        ends = _behind(list(dims), forward, marked)
        if ends and _stays_apart(dims, ends, forward) is False:
            found += [edge for edge, dim in dims.items() if _stays_apart({edge: dim}, ends, forward) is False]
    return found


def _stays_apart(kept: dict[GradientEdge, int], ends: dict[GradientEdge, int], forward: Looked) -> bool | None:
    """Whether half of the entries in these dimensions comes of that half of the samples alone; None: not known."""
    half, noise = forward.halves()[0], []
    for edge, dim in kept.items():
        like: Any = edge.node._input_metadata[edge.output_nr]
        mask = half.view(-1, *[1] * (len(like.shape) - dim - 1)).to(like.device)
        noise.append(noise_like(torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape), 0) * mask)
    try:
        came = Cut(list(ends), alone=True).gradients(list(kept), noise, list(ends))
    except Exception:  # it cannot be gone through here
        return None
    rows = [
        ((g != 0) & g.isfinite()).movedim(d, 0).reshape(forward.n, -1).any(1).cpu()
        for g, d in zip(came, ends.values(), strict=True)
        if g is not None
    ]
    return None if not any(bool(x.any()) for x in rows) else not any(bool((x & ~half).any()) for x in rows)


def _behind(
    edges: Iterable[GradientEdge], forward: Looked, marked: dict[Any, dict[int, Output]]
) -> dict[GradientEdge, int]:
    """The outputs and layers next behind these, and where their samples are."""
    waiting, seen, found = deque(x for edge in edges for x in edge.node.next_functions), set(), {}
    while waiting:
        node, number = waiting.popleft()
        if node is None or (node, number) in seen:
            continue
        seen.add((node, number))
        output = marked.get(node, {}).get(number)
        if output is None and not is_of_tap(node):
            waiting.extend(node.next_functions)
            continue
        dims = output.dims if output is not None else dims_in_layer(node, number, forward.n)
        if dims:
            found[GradientEdge(node, number)] = dims[0]
    return found
