"""Whether samples stay apart on the way from one forward pass to another: recurrences that the caller writes, an
encoder and a head that are two calls.

What a pass gave, and another takes, as an input or otherwise, has a graph of the caller's own between, of which no pass
sees anything. Autograd numbers a thread's nodes one after the other, so what a pass takes is where its nodes end. Noise
on some rows of that is pulled back to what earlier passes gave. Rows are parted by the binary digits of their samples'
numbers, so whose rows anything came to is read off, digit by digit; where a digit is both, it came to several.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfast.errors import UnsupportedModuleError, warn_caller
from dpfast.looks import said_by
from dpfast.modes.cut_graph import Cut
from dpfast.modes.loss_ends import REENTRANT, Looked, Output, dims_in_layer, marks
from dpfast.taps import is_of_tap
from dpfast.trials import noise_like

_MEET = (
    "samples meet between two forward passes: a tensor {} that one takes was made of what an earlier one gave, and not "
    "each row of it of that row alone (statistics of the batch, rows of other samples, another order). What a sample "
    "adds to the sum changes with another, and clipping bounds nothing; keep rows apart and in their order"
)
_ON_TRUST = (
    "whether samples meet between two forward passes cannot be seen, {}: one takes a tensor {} that was made of what "
    "an earlier one gave. That each row of it is made of that sample's own is taken on trust: if it is not so, "
    "clipping bounds nothing (docs/layouts.md)"
)
_NOT_TOLD = "as it is not known in which of the dimensions that has them"
_CHECKPOINT = "as they are in a reentrant checkpoint"

_Told = tuple[GradientEdge, int, Output]
"""What a pass gave, and in which dimension samples are."""


def check_between(ends: Iterable[tuple[Any, Looked]]) -> None:
    """Warns where it cannot be told.

    Args:
        ends: nodes of forward passes that losses come to, and which made them.

    Raises:
        UnsupportedModuleError: samples meet between what earlier passes gave and what one of these takes.
    """
    waiting, seen, taken = deque(ends), set(), set()
    while waiting:
        node, forward = waiting.popleft()
        if node in seen or forward.thread != threading.get_ident():
            continue
        seen.add(node)
        for following, number in node.next_functions:
            if following is None:
                continue
            if following._sequence_nr() in forward.nodes:
                waiting.append((following, forward))
            elif following.next_functions and (following, number, forward) not in taken:  # no parameter
                taken.add((following, number, forward))  # by many layers, as keys and values are
                before = _check(GradientEdge(following, number), forward)
                waiting.extend((edge.node, x.forward) for edge, x in before.items() if x.forward.nodes)


def _check(taken: GradientEdge, forward: Looked) -> dict[GradientEdge, Output]:
    """What it is made of that earlier passes gave."""
    ends, why = _ends(taken, forward.whose)
    shape = tuple(taken.node._input_metadata[taken.output_nr].shape)
    try:
        meet = bool(ends) and _meet(taken, forward, ends)
    except Exception as error:  # of a function that cannot be gone through
        meet, why = False, said_by(error)
    if meet:
        raise UnsupportedModuleError(_MEET.format(shape))
    if why is not None:
        warn_caller(_ON_TRUST.format(why, shape))
    return ends


def _ends(edge: GradientEdge, whose: Sequence[int]) -> tuple[dict[GradientEdge, Output], str | None]:
    """What passes have made that this comes of, next to it; and why samples cannot be told in some of it."""
    waiting: deque[Any] = deque([(edge.node, edge.output_nr)])
    seen, found, why = set(), {}, None
    while waiting:
        node, number = waiting.popleft()
        if node is None or (node, number) in seen:
            continue
        seen.add((node, number))
        here, output = GradientEdge(node, number), marks(node).get(number)
        if output is None and is_of_tap(node):
            output = _of_layer(here, whose)
        if output is not None:
            found[here] = output.told_by_layer(here)
            if found[here].dims is None and not output.is_refused:
                why = _NOT_TOLD
        elif type(node).__name__ == REENTRANT:
            why = _CHECKPOINT
        else:
            waiting.extend(node.next_functions)
    return found, why


def _of_layer(edge: GradientEdge, whose: Sequence[int]) -> Output:
    """Of a pass that is not looked at, or what it keeps; of as many samples, of the same units."""
    node: Any = edge.node
    n, graph = node.record.batch_size or 0, node.record.graph
    looked = None if graph is None else graph.looked
    if looked is None:
        looked = Looked(tuple(whose if n == len(whose) else range(n)), node.record.tap.batch_dim, range(0), 0)
    return Output(None, {}, "", looked, dims_in_layer(node, edge.output_nr, n) if n else None)


def _meet(taken: GradientEdge, forward: Looked, ends: dict[GradientEdge, Output]) -> bool:
    """Whether they do, wherever samples may be in what it came of."""
    told = [(edge, output, output.dims) for edge, output in ends.items() if output.dims]
    like: Any = taken.node._input_metadata[taken.output_nr]
    noise = noise_like(torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape), 0)
    pull, looks = _Pull(taken, ends), max((len(dims) for *_, dims in told), default=0)
    dim = _dim_of(like.shape, forward)
    return looks > 0 and all(
        _meet_in(noise, dim, [(edge, dims[min(look, len(dims) - 1)], x) for edge, x, dims in told], forward, pull)
        for look in range(looks)
    )


def _dim_of(shape: Sequence[int], forward: Looked) -> int | None:
    """In which dimension the pass has its samples there, not in which they may be by size: keys of all samples for each
    of them (N, N, D) have their own and others'."""
    found = [dim for dim, size in enumerate(shape) if size == forward.n]
    return forward.batch_dim if forward.batch_dim in found else min(found, default=None)


class _Pull:
    """Of noise on what is taken, the rows of what it came of to which anything comes, bool."""

    def __init__(self, taken: GradientEdge, ends: Iterable[GradientEdge]):
        self._taken, self._ends = taken, list(ends)
        self._cut = Cut(self._ends, alone=True)

    def __call__(self, noise: Tensor, told: Sequence[_Told]) -> list[Tensor]:
        grads = self._cut.gradients([self._taken], [noise], [edge for edge, *_ in told])
        return [
            torch.zeros(len(output.whose()), dtype=torch.bool)
            if g is None
            else ((g != 0) & g.isfinite()).movedim(dim, 0).flatten(1).any(1).cpu()
            for g, (_, dim, output) in zip(grads, told, strict=True)
        ]


def _meet_in(noise: Tensor, dim: int | None, told: Sequence[_Told], forward: Looked, pull: _Pull) -> bool:
    """Whether anything comes from rows to other samples' than their own; to any, where there are none."""
    if dim is None:
        return any(bool(some.any()) for some in pull(noise, told))
    names, index = torch.tensor(forward.whose).unique(return_inverse=True)
    digits = range(int(index.max()).bit_length())
    where = index.view(-1, *[1] * (noise.dim() - dim - 1)).to(noise.device)
    ones, zeros = ([pull(noise * ((where >> d & 1) == digit), told) for d in digits] for digit in (1, 0))
    for i, (*_, output) in enumerate(told):
        one, zero = (torch.stack([came[i] for came in some]) for some in (ones, zeros))
        if bool((one & zero).any()):  # of several
            return True
        there = (one | zero).any(0)
        places = (one.long() << torch.arange(len(one)).unsqueeze(1)).sum(0)
        found = names[places[there]]
        if not _are_same(found, output.whose()[there], output.n == forward.n):
            return True
    return False


def _are_same(found: Tensor, own: Tensor, by_number: bool) -> bool:
    """Whether each sample of one pass is one of the other; of the same number, where both have as many."""
    if by_number:
        return torch.equal(found, own)
    pairs = torch.stack([found, own]).unique(dim=1)
    return all(len(some) == len(some.unique()) for some in pairs)
