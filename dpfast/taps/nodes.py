"""Walks through autograd's graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any


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
