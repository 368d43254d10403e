"""Walks through autograd's graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge


def is_of_tap(node: Any) -> bool:
    """Whether it stands behind a tapped layer; its ``record.tap`` is that."""
    return hasattr(getattr(node, "record", None), "tap")


def nodes_behind(roots: Iterable[Any], goes_on: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """These nodes (None among them counts for nothing) and all that their gradients come to, each once, the nearest
    first.

    Args:
        goes_on: whether what is behind a node is wanted as well; asked after the node was given.
    """
    waiting, seen = deque(roots), set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if goes_on is None or goes_on(node):
            waiting.extend(following for following, _ in node.next_functions)


class Leads:
    """Whether gradients at a node come to one that is asked for, itself among them; each node is looked at once."""

    def __init__(self, is_one: Callable[[Any], bool]):
        self._is_one, self._known = is_one, dict[Any, bool]()

    def __call__(self, node: Any) -> bool:
        ways = [node]
        while ways:  # no recursion: graphs are deep
            at = ways[-1]
            if at not in self._known and self._is_one(at):
                self._known[at] = True
            if at in self._known:
                ways.pop()
                continue
            behind = [x for x, _ in at.next_functions if x is not None]
            unknown = [x for x in behind if x not in self._known]
            ways.extend(unknown)
            if not unknown:
                self._known[at] = any(self._known[x] for x in behind)
        return self._known[node]


def ends_among(edges: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Those of the edges that are behind none of the others: gradients at these alone come by all of them."""
    caught: set[Any] = {edge.node for edge in edges}
    leads = Leads(caught.__contains__)
    return [e for e in edges if not any(leads(x) for x, _ in e.node.next_functions if x is not None)]
