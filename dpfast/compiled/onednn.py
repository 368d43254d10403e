"""A captured graph's products of matrices by oneDNN, where that is the faster way; Inductor would leave them to MKL."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dpfast.arithmetic import products

_aten: Any = torch.ops.aten

# Inductor takes torch's own operator of constant weights alone.
_library = torch.library.Library("dpfast", "FRAGMENT")
_library.define("as_it_stands(Tensor x, Tensor y, Tensor? bias) -> Tensor")
_library.impl("as_it_stands", products.as_it_stands, "CPU")
_library.impl("as_it_stands", lambda x, y, bias: x.new_empty(len(x), len(y)), "Meta")
_as_it_stands: Any = torch.ops.dpfast.as_it_stands.default


def multiply_by_onednn(graph: fx.Graph) -> None:
    """Layers' products, which read both operands as they stand, and sums over a batch, whose left one is copied."""
    for node in (*graph.find_nodes(op="call_function", target=_aten.mm.default), *_with_bias(graph)):
        *bias, x, y = node.args
        left, right, *rest = (of.meta["val"] for of in (x, y, *bias))
        if not products.suits_layer(left, right.mT, *rest):
            (r, k), c = left.shape, right.shape[1]
            whole = left.mT.is_contiguous() and (right.is_contiguous() or right.mT.is_contiguous())
            if bias or not whole or not products.by_onednn(r, k, c, left):
                continue
            with graph.inserting_before(node):
                x = graph.call_function(_aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
        with graph.inserting_before(node):
            found = graph.call_function(_as_it_stands, (x, _transposed(graph, y), *(bias or (None,))))
        found.meta.update(node.meta)
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def _with_bias(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="call_function", target=_aten.addmm.default) if not node.kwargs]


def _transposed(graph: fx.Graph, y: Any) -> fx.Node:
    return y.args[0] if y.target is _aten.t.default else graph.call_function(_aten.t.default, (y,))
