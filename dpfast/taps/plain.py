"""Nearly all layers: one tensor goes in, one made afresh comes out, and a rule of the layer's class takes both.

What the general way (``tap.Tap.caught``) asks at each run is told here from what has been known of the module's class,
and its node (``node.TapFunction``) has one output and one input. Such layers take longer to tap than to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.taps.detached import run_detached
from dpfast.taps.gathered import rows_are_followed
from dpfast.taps.inherited import has_helpers, methods_of
from dpfast.taps.node import Record, TapFunction
from dpfast.taps.own_node import OwnNode, find_node, may_be_one, tapped_layer
from dpfast.taps.passes import in_backward, suspended
from dpfast.taps.registry import Rule, find_fault, makes_fresh_output, plain_rule, reads_input, registered

_will_run = torch._C._will_engine_execute_node
_trained: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # of a tensor, without a line of Python
_transforms = torch._C._are_functorch_transforms_active  # of torch.func


class Known(NamedTuple):
    """Of a module's class, as long as nothing else is registered.

    Attributes:
        rule: None where layers of the class go the general way.
        places_samples: the tap may have to expand an input to the batch.
        node: one that is the layer's own and the tap's, where there is one.
        helpers: what its forward runs beside.
    """

    cls: type
    registered: tuple[Any, ...]
    rule: Rule | None
    places_samples: bool
    node: OwnNode | None
    helpers: tuple[tuple[str, Any], ...]


def _known(module: nn.Module) -> Known:
    rule = None if isinstance(module, nn.EmbeddingBag) else plain_rule(module)
    if not makes_fresh_output(rule):
        rule = None
    cls = type(module)
    helpers = () if rule is None else methods_of(cls).helpers
    return Known(cls, registered(cls), rule, isinstance(module, nn.Embedding), find_node(cls), helpers)


class Own(NamedTuple):
    """A module's parameters, as they were.

    Attributes:
        numbers: their ids, None's too. values: without None. flags: which of these are trained.
        trained, names: those.
        reads: whether their gradients follow from more than the backprops.
        fits: the class's own node may run: what it reads are parameters, not buffers or attributes in the place of
            some, and all are torch's, and no subclass.
    """

    numbers: list[int]
    values: list[nn.Parameter]
    flags: list[bool]
    trained: list[nn.Parameter]
    names: tuple[str, ...]
    reads: bool
    fits: bool

    @classmethod
    def of(cls, parameters: Mapping[str, Any], known: Known) -> Own:
        values = [p for p in parameters.values() if p is not None]
        trained = {name: p for name, p in parameters.items() if p is not None and p.requires_grad}
        node, reads = known.node, reads_input(known.rule, trained.keys())
        fits = node is not None and node.names <= parameters.keys() and all(type(p) is nn.Parameter for p in values)
        numbers, flags = list(map(id, parameters.values())), [p.requires_grad for p in values]
        return cls(numbers, values, flags, list(trained.values()), tuple(trained), reads, fits)


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
        known, tap.own_parameters = _known(module), None
        tap.plain = known
    if known.rule is None or type(x) is not Tensor or module._modules or module.__dict__.get("forward") is not own:
        return None
    if known.helpers and not has_helpers(module, known.helpers):
        return None
    if tap.alone or tap.sends or tap.receives or suspended() or rows_are_followed() or _transforms():
        return None
    taps = tap.taps
    if not torch.is_grad_enabled() or not taps.inserts or find_fault(module) is not None:
        return None
    created_in = in_backward()
    here = taps.forward_here() if created_in is None else None
    if here is None and created_in is None:
        return None
    n = here.size if here is not None else taps.batch_size()
    dims = x.dim()
    if known.places_samples and (n is None or (n > 1 and (dims < 2 or 1 in x.shape))):
        return None
    values = module._parameters.values()
    of: Own | None = tap.own_parameters
    if of is None or of.numbers != list(map(id, values)) or of.flags != list(map(_trained, of.values)):
        of = tap.own_parameters = Own.of(module._parameters, known)
    parameters, node = of.trained, known.node
    if not parameters:
        return None
    record = Record.__new__(Record)
    record.tap, record.rule, record.parameters, record.names = tap, known.rule, parameters, of.names
    record.batch_size, record.leaves, record.followed = n, [x], [x.requires_grad]
    record.graph = None if here is None else here.graph
    if not of.reads and not taps.force_functorch:
        record.unread, record.leaves = True, [x.new_full((), torch.nan).expand(x.shape)]  # of four bytes
    if node is not None and of.fits and n is not None and here is not None and cls.forward is node.plain:
        place = tap.places.get(dims + node.rank)
        usual = type(place) is int and tap.given is None and here.kind is not None
        if usual and dims > 1 and may_be_one(x):
            record.place, record.units, record.valid = place, here.units, here.valid
            record.uses = taps.count_uses(parameters)
            return tapped_layer(record, node, x, *parameters)  # type: ignore[no-untyped-call]  # torch's
    output = run_detached(module._parameters, cls.forward, module, x)
    if type(output) is not Tensor or not output.is_floating_point():
        return tap.tapped(output, ((x,), {}), parameters, fresh=True, rule=known.rule)
    record.created_in, (record.units, record.valid) = created_in, taps.whose()
    record.place = tap._place(output, record)
    if created_in is None:
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
