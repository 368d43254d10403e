"""Gradients at the edges where a loss's own graph ends, by that graph alone.

A tensor that the model keeps may be one that its output is made from, and the loss of both. Autograd gives its gradient
by all ways, that through the output and the model's layers too. What a loss does by itself is by the ways that go
through none of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        by_hand: no hook on gradients there may run.
    """

    def __init__(self, edges: Sequence[GradientEdge], *, by_hand: bool = False):
        self._edges = set(edges)
        self.nodes = {edge.node for edge in edges}
        self._by_hand = by_hand or len(ends_among(edges)) < len(edges)

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
        parts = [(_plain(x.node, x.output_nr), g) for x, g in zip(at, grads, strict=True)]
        last = [node for node in nodes_behind((x.node for x in at), self._goes_on) if any(self._ends_of(node))]
        into = [GradientEdge(node, i) for node in last for i in range(len(node._input_metadata))]
        came = dict(zip(into, torch.autograd.grad(roots, into, grads, **how) if into else (), strict=True))
        for node in last:
            given = [came[GradientEdge(node, i)] for i in range(len(node._input_metadata))]
            if any(g is not None for g in given):
                parts += self._through(node, given, how)
        found: dict[GradientEdge, Tensor] = {}
        for edge, g in parts:
            if edge in self._edges:
                found[edge] = found[edge] + g if edge in found else g
        return [found.get(edge) for edge in asked]

    def _goes_on(self, node: Any) -> bool:
        return node not in self.nodes

    def _ends_of(self, node: Any) -> Iterator[GradientEdge]:
        if node not in self.nodes:
            yield from (edge for edge in (_plain(*x) for x in node.next_functions) if edge in self._edges)

    def _through(
        self, node: Any, given: Sequence[Tensor | None], how: dict[str, Any]
    ) -> Iterator[tuple[GradientEdge, Tensor]]:
        """What one node, next to the edges, makes of its gradients."""
        if callable(node):
            with torch.set_grad_enabled(how["create_graph"]):
                made = node(*given)
            edges = [_plain(*x) for x in node.next_functions]
            made = made if isinstance(made, tuple) else (made,)
        else:  # a function of one's own, whose numbers of gradients and of edges differ
            edges = list(dict.fromkeys(self._ends_of(node)))
            some = [(GradientEdge(node, i), g) for i, g in enumerate(given) if g is not None]
            made = torch.autograd.grad([x for x, _ in some], edges, [g for _, g in some], **how)
        for edge, g in zip(edges, made, strict=True):
            if g is not None and edge in self._edges:
                like: Any = edge.node._input_metadata[edge.output_nr]  # autograd itself sums where it was broadcast
                yield edge, g.sum_to_size(like.shape).to(like.dtype)


def _plain(node: Any, number: int) -> GradientEdge:
    """Edges of tensors have more, and are unlike those of nodes."""
    return GradientEdge(node, number)
