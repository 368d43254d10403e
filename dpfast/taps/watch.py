"""Gradients that come to a module's output past its tap.

A forward of somebody's own may keep its output, or something made of it, before the tap stands behind it. What the loss
makes of that would be missing in the gradients of the module's parameters, so it is an error that names the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dpfast.errors import EscapedGradientError


class Watch:
    """Of the outputs of one run of a tapped module.

    Args:
        layer: what errors name.
        parameters: of the module.
    """

    def __init__(self, layer: str, parameters: Sequence[nn.Parameter]):
        self.layer = layer
        self.parameters = [weakref.ref(p) for p in parameters]  # an output may be kept by the module itself
        self.passed: dict[int, Tensor] = {}

    def watched(self, outputs: Sequence[Tensor], not_its_own: Sequence[object], since: int) -> list[Tensor]:
        """What to tap in the place of the outputs, which are watched from here on.

        Args:
            not_its_own: tensors that others use too, its inputs and buffers.
            since: autograd's sequence number before the forward; what is older was not made in it.
        """
        found = []
        for place, x in enumerate(outputs):
            shared = any(x is y for y in not_its_own) or x.is_inference()
            if not (shared or x.requires_grad):
                # Nothing of it has a history, so the tap goes without it, and whatever comes here comes from elsewhere.
                inner, x = x, x.detach()
                inner.requires_grad_().register_hook(partial(self._check, None))
            elif not shared and _is_of_now(x, since) and not _is_passed_through(x, outputs):
                x.register_hook(partial(self._check, place))
            found.append(x)
        return found

    def pass_on(self, grads: Sequence[Tensor | None]) -> None:
        """The tap passes these on to the outputs."""
        self.passed = {place: g for place, g in enumerate(grads) if g is not None}

    def _check(self, place: int | None, grad: Tensor) -> None:
        """Autograd hands on a gradient that comes alone as it is, and else a sum."""
        if self.passed.pop(place, None) is grad or not self._wanted():
            return
        raise EscapedGradientError(
            f"{self.layer}: a gradient reached its output past the end of its forward, because the forward kept the "
            "output, or something made of it, and the loss uses that; or because a hook on the output changed it. "
            "Return what the loss uses, or keep it in a forward hook of the layer"
        )

    def _wanted(self) -> bool:
        """Whether this pass is to give gradients of the parameters."""
        parameters = [p for p in (ref() for ref in self.parameters) if p is not None and p.requires_grad]
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        return any(torch._C._will_engine_execute_node(node) for node in nodes)


def may_keep_output(forward: Callable) -> bool:
    """Whether it is not torch's own forward, which keeps nothing."""
    return not (getattr(forward, "__module__", None) or "").startswith("torch.")


def _is_of_now(x: Tensor, since: int) -> bool:
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= since


def _is_passed_through(x: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether gradients of other outputs come through x, so that what reaches it is not what the tap passed on."""
    if len(outputs) == 1:
        return False
    edges, seen = [(y.grad_fn, y.output_nr) for y in outputs if y is not x], set()
    node_of_x, oldest = x.grad_fn, x.grad_fn._sequence_nr()
    while edges:
        node, number = edges.pop()
        if node is node_of_x and number == x.output_nr:
            return True
        if node is not None and node not in seen and node._sequence_nr() >= oldest:
            seen.add(node)
            edges.extend(node.next_functions)
    return False
