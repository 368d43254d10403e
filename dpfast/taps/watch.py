"""Gradients that leave a module past its tap.

A forward of somebody's own may keep its output, or something made on the way to it, before the tap stands behind it.
What the loss makes of that would be missing in the gradients of the module's parameters, so it is an error that names
the layer. Seen are all such gradients of a module without children whose inputs need no gradient; else those that come
to an output, or to what the forward has left in the module's own attributes. One that comes to something kept elsewhere
goes on to the inputs alone; where that has none but the module's own parameters, fake tensors show it
(``beside_outputs``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpfast.errors import EscapedGradientError, UnsupportedModuleError
from dpfast.taps.nodes import nodes_behind

BESIDE = "beside its outputs"
"""What is known of a layer that leaves something of its own parameters there."""

_NOT_KEPT = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold its parameters, buffers, children and hooks."""


class Named(Protocol):
    layer: str


class Watch:
    """Of one run of a tapped module, made before its forward.

    Args:
        tap: whose name errors have.
    """

    def __init__(self, tap: Named):
        self._layer = tap.layer
        self._since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # of autograd's nodes
        self._shown: list[Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._passed: dict[int | None, Tensor] = {}

    def shown(self, parameter: nn.Parameter) -> Tensor:
        """What the forward gets in its place, where no gradient has to go through the forward: none may come here."""
        found = parameter.detach()
        if parameter.requires_grad:
            self._handles.append(found.requires_grad_().register_hook(partial(self._check, None)))
            self._shown.append(found)
        return found

    def watched(self, outputs: Sequence[Tensor], *, not_its_own: Sequence[object]) -> list[Tensor]:
        """What to tap in the place of the outputs, which are watched from here on.

        Args:
            not_its_own: tensors that others use too, its inputs and buffers.
        """
        found = []
        parted = bool(self._shown) and all(self._comes_from_shown(x) for x in outputs)
        if self._shown and not parted:  # there is a way to other layers' outputs after all
            for handle in self._handles:
                handle.remove()
        for place, x in enumerate(outputs):
            if any(x is y for y in not_its_own) or x.is_inference():
                found.append(x)
            elif not x.requires_grad:
                x.requires_grad_().register_hook(partial(self._check, None))
                found.append(x.detach())
            elif parted:
                found.append(x.detach())
            else:
                of_now = x.grad_fn is not None and x.grad_fn._sequence_nr() >= self._since
                if of_now and not _is_passed_through(outputs, place):
                    x.register_hook(partial(self._check, place))
                found.append(x)
        self._shown, self._handles = [], []
        return found

    def guard_kept(self, module: nn.Module) -> None:
        """What the forward has left in the module's attributes on the way to its outputs is replaced by a view of it,
        which only those see who use it later: no gradient may come there."""
        attributes = vars(module)
        for name, kept in list(attributes.items()):
            if name not in _NOT_KEPT:
                attributes[name] = self._guarded(kept)

    def _guarded(self, kept: Any) -> Any:
        if isinstance(kept, Tensor):
            node = kept.grad_fn
            if node is None or node._sequence_nr() < self._since or kept.is_inference():
                return kept
            view = kept.view_as(kept)
            view.register_hook(partial(self._check, None))
            return view
        of_dict = type(kept) is dict
        if of_dict or type(kept) in (list, tuple):
            items = kept.values() if of_dict else kept
            if any(isinstance(x, Tensor) for x in items):
                guarded = [self._guarded(x) for x in items]
                return dict(zip(kept, guarded, strict=True)) if of_dict else type(kept)(guarded)
        return kept

    def pass_on(self, grads: Sequence[Tensor | None]) -> None:
        """The tap passes these on to the outputs."""
        self._passed = {place: g for place, g in enumerate(grads) if g is not None}

    def _check(self, place: int | None, grad: Tensor) -> None:
        """Autograd hands on a gradient that comes alone as it is, and else a sum."""
        if self._passed.pop(place, None) is grad or not _leaves_gradients(torch._C._current_autograd_node()):
            return
        raise EscapedGradientError(
            f"{self._layer}: a gradient left it past the end of its forward, because the forward kept its output, or "
            "something made on the way to it, and the loss uses that; or because a hook on the output changed it. "
            "Return what the loss uses"
        )

    def _comes_from_shown(self, x: Tensor) -> bool:
        """Whether gradients of x reach nothing but what was shown."""
        for node in nodes_behind([x.grad_fn]):
            leaf = getattr(node, "variable", None)  # of the nodes at the ends
            if leaf is None and node._sequence_nr() < self._since:
                return False
            if leaf is not None and not any(leaf is y for y in self._shown):
                return False
        return x.grad_fn is not None or not x.requires_grad


def may_keep_output(forward: Callable[..., Any]) -> bool:
    """Whether it is not torch's own forward, which keeps nothing."""
    return not (getattr(forward, "__module__", None) or "").startswith("torch.")


def _leaves_gradients(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the pass that runs, which is at that node, leaves gradients in tensors, and is not one that gives those
    of a few (``torch.autograd.grad``)."""
    for behind in nodes_behind([node]):
        if getattr(behind, "variable", None) is not None:
            try:
                if torch._C._will_engine_execute_node(behind):
                    return True
            except RuntimeError:  # torch's way to say that the gradient is given
                pass
    return False


def _is_passed_through(outputs: Sequence[Tensor], place: int) -> bool:
    """Whether gradients of other outputs come through that one, so that more than the tap passed on reaches it."""
    if len(outputs) == 1:
        return False
    x = outputs[place]
    edges, seen = [(y.grad_fn, y.output_nr) for i, y in enumerate(outputs) if i != place], set()
    node_of_x: Any = x.grad_fn
    oldest = node_of_x._sequence_nr()
    while edges:
        node, number = edges.pop()
        if node is node_of_x and number == x.output_nr:
            return True
        if node is not None and node not in seen and node._sequence_nr() >= oldest:
            seen.add(node)
            edges.extend(node.next_functions)
    return False


def refuse_what_is_left(layer: str, known: Sequence[Any]) -> None:
    """Raises UnsupportedModuleError where that is among what is known of the layer, as keys of ``Tap.places``."""
    places = [key[1] for key in known if isinstance(key, tuple) and key[0] == BESIDE]
    if places:
        raise UnsupportedModuleError(
            f"{layer}: its forward leaves something that it makes of its own parameters beside its outputs, "
            f"{places[0]}, where it would have no gradient: return it as a tensor, in tuples, lists or dicts, and make "
            "the object of it where the loss is made; or freeze these parameters"
        )
