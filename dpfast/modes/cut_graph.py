"""Gradients at the edges where a loss's own graph ends, by that graph alone.

A tensor that the model keeps may be one that its output is made from, and the loss of both. Autograd gives its gradient
by all ways, that through the output and the model's layers too. What a loss does by itself is by the ways that go
through none of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpfast.taps import ends_among, nodes_behind


class Cut:
    """Where it ends.

    Attributes:
        nodes: of the edges.

    Args:
        by_hand: no hook on gradients there may run. alone: nor any other in front of it.
    """

    def __init__(self, edges: Sequence[GradientEdge], *, by_hand: bool = False, alone: bool = False):
        self._edges = set(edges)
        self.nodes = {edge.node for edge in edges}
        self._alone = alone
        self._by_hand = by_hand or alone or len(ends_among(edges)) < len(edges)
        nexts = (x for node in self.nodes for x, _ in node.next_functions) if self._by_hand and not alone else ()
        self._behind = set(nodes_behind(nexts))  # where autograd would give what has come through the edges too

    def gradients(
        self,
        roots: Sequence[Tensor] | Sequence[GradientEdge],
        grads: Sequence[Tensor],
        asked: Sequence[GradientEdge],
        *,
        create_graph: bool = False,
    ) -> Sequence[Tensor | None]:
        """At some of these edges; the graph stays."""
        how: dict[str, Any] = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
        if not self._by_hand:
            return torch.autograd.grad(roots, asked, grads, **how)
        at = [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in roots]
        own = [node for node in nodes_behind((x.node for x in at), self._goes_on) if node not in self.nodes]
        by_hand = self._to_run(own)
        front = [] if self._alone else [node for node in by_hand if node not in self._behind]
        into = [edge for node in front for edge in _inputs(node)]
        came = torch.autograd.grad(roots, into, grads, **how) if into else ()
        found: dict[GradientEdge, Tensor] = {}
        starts = ((_plain(x.node, x.output_nr), g) for x, g in zip(at, grads, strict=True))
        running, asked_of_autograd = set(by_hand), set(into)
        _add_up(found, ((edge, g) for edge, g in starts if edge not in asked_of_autograd))
        _add_up(found, ((edge, g) for edge, g in zip(into, came, strict=True) if g is not None))
        del came
        for node in by_hand:
            given = [found.pop(edge, None) for edge in _inputs(node)]
            if any(g is not None for g in given):
                made = self._through(node, given, how)
                _add_up(found, (x for x in made if x[0] in self._edges or x[0].node in running))
        return [found.get(edge) for edge in asked]

    def _goes_on(self, node: Any) -> bool:
        return node not in self.nodes

    def _to_run(self, own: Sequence[Any]) -> list[Any]:
        """Those of the nodes in front of the edges that autograd is not to run, in order: next to these, or behind some
        of them too."""
        lead: dict[Any, bool] = {}  # to an edge; whether by hand
        for node in reversed(_in_order(own)):
            edges = [_plain(*x) for x in node.next_functions]
            ends = any(edge in self._edges for edge in edges)
            if ends or any(edge.node in lead for edge in edges):
                lead[node] = ends or self._alone or any(x in self._behind for x in (node, *(y.node for y in edges)))
        return [node for node in reversed(lead) if lead[node]]

    def _through(
        self, node: Any, given: Sequence[Tensor | None], how: dict[str, Any]
    ) -> Iterator[tuple[GradientEdge, Tensor]]:
        """What one node makes of its gradients."""
        if callable(node):
            with torch.set_grad_enabled(how["create_graph"]):
                made = node(*given)
            edges = [_plain(*x) for x in node.next_functions]
            made = made if isinstance(made, tuple) else (made,)
        else:  # a function of one's own, not to be run by autograd: one edge may be behind another
            some = [
                torch.zeros(x.shape, dtype=x.dtype, device=x.device) if g is None else g
                for x, g in zip(node._input_metadata, given, strict=True)
            ]
            with torch.set_grad_enabled(how["create_graph"]):
                made = node.apply(*some)
            made = made if isinstance(made, tuple) else (made,)
            made = [g for g, needs in zip(made, node.needs_input_grad, strict=False) if needs]
            edges = [_plain(*x) for x in node.next_functions if x[0] is not None]
        for edge, g in zip(edges, made, strict=True):
            if g is not None and edge.node is not None:  # some nodes make gradients of what has none
                like: Any = edge.node._input_metadata[edge.output_nr]  # autograd itself sums where it was broadcast
                yield edge, g.sum_to_size(like.shape).to(like.dtype)


def _plain(node: Any, number: int) -> GradientEdge:
    """Edges of tensors have more, and are unlike those of nodes."""
    return GradientEdge(node, number)


def _inputs(node: Any) -> list[GradientEdge]:
    return [_plain(node, i) for i in range(len(node._input_metadata))]


def _add_up(found: dict[GradientEdge, Tensor], more: Iterable[tuple[GradientEdge, Tensor]]) -> None:
    for edge, g in more:
        found[edge] = found[edge] + g if edge in found else g


def _in_order(nodes: Iterable[Any]) -> list[Any]:
    """Each after those of the nodes that its gradients come from."""
    waits = dict.fromkeys(nodes, 0)
    for node in waits:
        for following, _ in node.next_functions:
            if following in waits:
                waits[following] += 1
    order = [node for node, number in waits.items() if not number]
    for node in order:  # which grows
        for following, _ in node.next_functions:
            if following in waits:
                waits[following] -= 1
                if not waits[following]:
                    order.append(following)
    return order
