"""One autograd node for a layer and its tap.

Behind a small layer the tap's node, the layer's own nodes and what detaches its parameters from them take longer than
its arithmetic. Of a few classes the backward pass is one call that is known: their forward runs within the tap's node,
where nothing is recorded, and the node gives the gradient of the input as torch's own would, to the bit; large products
are oneDNN's where that is faster, with other last bits. What it saves is other than what they would, so it is not taken
where saved tensors have hooks (checkpoints, offload).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.taps.node import Record, TapFunction, once

_will_run = torch._C._will_engine_execute_node
_autocast = torch.is_autocast_enabled
# Of saved tensors: a checkpoint's forward must save the same when it is repeated. (torch before 2.8 cannot be asked.)
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def may_be_one(x: Tensor) -> bool:
    """Whether what takes ``x`` may run within a tap's node."""
    return _hooks(True) is None and not (_autocast("cpu") or _autocast("cuda") or x.is_inference())


class OwnNode(NamedTuple):
    """A class's forward and backward pass.

    Attributes:
        plain: the forward of the class, of which they are those.
        rank: how many dimensions its output has more than its input.
        names: the parameters that they read.
        forward: ``(parameters, layer, x) -> (output, what the backward pass takes)``; nothing is recorded in it.
        backward: ``(gradient, x, *what it takes) -> gradient of x``; None where no gradient goes through x. Of x it
            reads no more than the shape where the class's rule does not (``register_rule``, without_input).
    """

    plain: Callable[..., Any]
    rank: int
    names: frozenset[str]
    forward: Callable[[Mapping[str, Any], Any, Tensor], tuple[Tensor, tuple[Any, ...]]]
    backward: Callable[..., Tensor] | None


_nodes: dict[type[nn.Module], OwnNode] = {}
_of_names: dict[str, tuple[Any, ...]] = {}  # of classes of packages that may not be there; all but the plain forward


def register_node(
    target: type[nn.Module] | str,
    forward: Callable[[Mapping[str, Any], Any, Tensor], tuple[Tensor, tuple[Any, ...]]],
    backward: Callable[..., Tensor] | None,
    *,
    names: tuple[str, ...] = ("weight", "bias"),
    rank: int = 0,
) -> None:
    """Gives a class, or the one of that full name, and it alone, a node of its own; see :class:`OwnNode`."""
    of = rank, frozenset(names), forward, backward
    if isinstance(target, str):
        _of_names[target] = of
    else:
        _nodes[target] = OwnNode(target.forward, *of)


def find_node(cls: type[nn.Module]) -> OwnNode | None:
    """Of that very class."""
    of = _of_names.get(f"{cls.__module__}.{cls.__qualname__}")
    if of is not None and cls not in _nodes and cls.forward.__qualname__ == f"{cls.__qualname__}.forward":
        _nodes[cls] = OwnNode(cls.forward, *of)
    return _nodes.get(cls)


class LayerTap(torch.autograd.Function):
    """The layer, and :class:`node.TapFunction` behind it."""

    @staticmethod
    def forward(ctx: Any, record: Record, node: OwnNode, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.record, ctx.node = record, node
        module = record.tap.module
        output, taken = node.forward(module._parameters, module, x)
        kept = record.leaves[0].detach()
        record.leaves[0] = None
        if node.backward is not None and x.requires_grad:
            ctx.save_for_backward(kept, *taken)
        else:
            ctx.save_for_backward(kept)
        ctx.set_materialize_grads(False)
        # No view to autograd, so operations in place may follow.
        return output.detach() if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return once(LayerTap.backward, ctx, grad)  # where it is not
        edges = ctx.next_functions
        to_parameters: tuple[Tensor | None, ...] = (None,) * (len(edges) - 1)
        if grad is None:
            return None, None, None, *to_parameters
        record: Record = ctx.record
        saved = ctx.saved_tensors  # once: checkpoints give them once
        first = edges[1][0]
        try:
            runs = first is not None and _will_run(first)
        except RuntimeError:  # torch.autograd.grad: the general way says it
            runs = False
        if not runs or not record.tap.taps.waits(record, saved[0], grad):
            _, _, *to_parameters = TapFunction._caught(ctx, grad, saved=saved[:1])  # type: ignore[assignment]
        of_input = ctx.node.backward(grad, *saved) if len(saved) > 1 else None
        return None, None, of_input, *to_parameters


tapped_layer = super(torch.autograd.Function, LayerTap).apply  # without transforms of torch.func


class OwnStep(NamedTuple):
    """A step of a layer whose backward pass gives what the step's rule takes.

    Attributes:
        forward: ``(x, *values) -> (output, what the backward pass takes)``; nothing is recorded in it.
        backward: ``(gradient, with_input, *what it takes) -> (gradient of x, or None, and the rule's backprops)``.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor | None, tuple[Tensor, ...]]]


class StepTap(torch.autograd.Function):
    """The step, and :class:`node.TapFunction` of its parameters."""

    @staticmethod
    def forward(
        ctx: Any, record: Record, step: OwnStep, values: Sequence[Tensor], x: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        output, taken = step.forward(x, *values)
        ctx.record, ctx.step, ctx.with_input = record, step, x.requires_grad
        ctx.save_for_backward(*taken)
        ctx.set_materialize_grads(False)
        return output.detach() if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return once(StepTap.backward, ctx, grad)
        if grad is None:
            return (None,) * (3 + len(ctx.next_functions))
        of_input, backprops = ctx.step.backward(grad, ctx.with_input, *ctx.saved_tensors)
        caught = TapFunction._caught(ctx, *backprops, saved=())
        return None, None, None, of_input, *caught[1 + len(backprops) :]


tapped_step = super(torch.autograd.Function, StepTap).apply  # likewise
