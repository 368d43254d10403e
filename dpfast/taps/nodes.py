"""Walks through autograd's graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


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


def ends_among(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of the tensors that are made of none of the others: gradients of these alone come by all of them."""
    caught: set[Any] = {x.grad_fn for x in tensors} - {None}
    leads_to_one: dict[Any, bool] = {None: False}
    for first in caught:
        ways = [first]
        while ways:  # no recursion: graphs are deep
            node = ways[-1]
            behind = [n for n, _ in node.next_functions if n is not None]
            unknown = [n for n in behind if n not in leads_to_one and n not in caught]
            ways.extend(unknown)
            if not unknown:
                leads_to_one[ways.pop()] = any(n in caught or leads_to_one[n] for n in behind)
    return [x for x in tensors if not leads_to_one[x.grad_fn]]
