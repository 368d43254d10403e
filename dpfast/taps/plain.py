"""Nearly all layers: one tensor goes in, one made afresh comes out, and a rule of the layer's class takes both.

What the general way (``tap.Tap.caught``) asks at each run is told here from what has been known of the module's class,
and its node (``node.TapFunction``) has one output and one input. Such layers take longer to tap than to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.taps.detached import run_detached
from dpfast.taps.gathered import rows_are_followed
from dpfast.taps.layout import kind_here
from dpfast.taps.node import Record, TapFunction
from dpfast.taps.passes import in_backward, suspended
from dpfast.taps.registry import Rule, find_fault, makes_fresh_output, plain_rule, registered

_will_run = torch._C._will_engine_execute_node
_transforms = torch._C._are_functorch_transforms_active  # of torch.func


class Known(NamedTuple):
    """Of a module's class, as long as nothing else is registered.

    Attributes:
        rule: None where layers of the class go the general way.
        places_samples: the tap may have to expand an input to the batch.
    """

    cls: type
    registered: tuple[int, ...]
    rule: Rule | None
    places_samples: bool


def _known(module: nn.Module) -> Known:
    rule = None if isinstance(module, nn.EmbeddingBag) else plain_rule(module)
    if not makes_fresh_output(rule):
        rule = None
    return Known(type(module), registered(type(module)), rule, isinstance(module, nn.Embedding))


def caught_plainly(tap: Any, own: object, x: object) -> Any:
    """The output of the module's forward on ``x``, tapped; None, and nothing has run, where the general way is to be
    taken.

    Args:
        tap: a ``Tap``. own: the ``TappedForward`` that stands for the module's own forward.
    """
    module: nn.Module = tap.module
    known: Known | None = tap.plain
    cls: Any = type(module)
    if known is None or known.cls is not cls or known.registered != registered(cls):
        known = tap.plain = _known(module)
    if known.rule is None or type(x) is not Tensor or module._modules or module.__dict__.get("forward") is not own:
        return None
    if tap.alone or tap.sends or tap.receives or suspended() or rows_are_followed() or _transforms():
        return None
    taps = tap.taps
    if not torch.is_grad_enabled() or not taps.inserts or find_fault(module) is not None:
        return None
    n = taps.batch_size()
    if known.places_samples and (n is None or (n > 1 and (x.dim() < 2 or 1 in x.shape))):
        return None
    parameters = [p for p in module._parameters.values() if p is not None and p.requires_grad]
    if not parameters:
        return None
    output = run_detached(module._parameters, cls.forward, module, x)
    if type(output) is not Tensor or not output.is_floating_point():
        return tap.tapped(output, ((x,), {}), parameters, fresh=True, rule=known.rule)
    record = Record.__new__(Record)
    record.tap, record.rule, record.parameters, record.batch_size = tap, known.rule, parameters, n
    record.units, record.leaves, record.followed = taps.units(), [x], [x.requires_grad]
    record.created_in = in_backward()
    if record.created_in is not None:
        record.place = tap._place(output, record)
    else:
        place = tap.places.get(output.dim())
        usual = type(place) is int and tap.given is None and n is not None and kind_here(taps) is not None
        record.place = place if usual else tap._place(output, record)
        record.uses = taps.count_uses(parameters)
    return _apply(record, output, *parameters)  # type: ignore[no-untyped-call]  # torch's


class PlainTap(torch.autograd.Function):
    """:class:`node.TapFunction` of one output and one input."""

    @staticmethod
    def forward(ctx: Any, record: Record, output: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(record.leaves[0].detach())
        record.leaves[0] = None
        ctx.set_materialize_grads(False)
        # Nobody else has the output. This one is no view of it to autograd, so operations in place may follow.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None or torch.is_grad_enabled():
            return TapFunction.backward(ctx, grad)
        record: Record = ctx.record
        edges = ctx.next_functions
        try:
            wanted = edges[1][0] is not None and _will_run(edges[1][0])
        except RuntimeError:  # torch.autograd.grad: the general way says it
            wanted = False
        saved = ctx.saved_tensors if wanted else None
        if saved is not None and record.tap.taps.waits(record, saved[0], grad):
            return None, grad, *(None,) * (len(edges) - 1)
        return TapFunction._caught(ctx, grad, saved=saved)


_apply = super(torch.autograd.Function, PlainTap).apply  # without transforms of torch.func
