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


def ends_among(edges: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Those of the edges that are behind none of the others: gradients at these alone come by all of them."""
    caught: set[Any] = {edge.node for edge in edges}
    leads_to_one: dict[Any, bool] = {}
    for first in caught:
        ways = [first]
        while ways:  # no recursion: graphs are deep
            node = ways[-1]
            behind = [n for n, _ in node.next_functions if n is not None]
            unknown = [n for n in behind if n not in leads_to_one and n not in caught]
            ways.extend(unknown)
            if not unknown:
                leads_to_one[ways.pop()] = any(n in caught or leads_to_one[n] for n in behind)
    return [edge for edge in edges if not leads_to_one[edge.node]]
