"""What a captured graph's ``arithmetic.pinned`` come to in Inductor: each tensor is written to memory once, by what
makes it, and whoever else reads it reads it there."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_pinned: Any = torch.ops.dpfast.pinned.default
_aten: Any = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
    }
)
"""Of all entries of their argument."""


def pin_where_made(graph: fx.Graph) -> None:
    """Pins of 16 bits go to what is viewed, and before all that reads it. Where others have read it first, Inductor has
    it in memory as it was without the pin, and the pinned one beside it."""
    pins: dict[fx.Node, fx.Node] = {}
    for pin in graph.find_nodes(op="call_function", target=_pinned):
        x = made = pin.args[0]
        while made.op == "call_function" and made.target in _VIEWS:
            made = made.args[0]
        if x.meta["val"].dtype.itemsize != 2 or made.op != "call_function":
            continue
        if made.target is not _pinned:
            if _is_written_to(_memory_of(made)):  # before the pin, or after it: it stays between
                continue
            if made not in pins:
                with graph.inserting_after(made):
                    pins[made] = graph.call_function(_pinned, (made,))
                pins[made].meta.update(made.meta)
                made.replace_all_uses_with(pins[made], delete_user_cb=lambda user, of=pins[made]: user is not of)
            x = pin.args[0]
        pin.replace_all_uses_with(x)
        graph.erase_node(pin)


def _memory_of(x: fx.Node) -> fx.Node:
    """What made the memory that it is in."""
    while _is_in_memory_of_others(x):
        x = x.args[0]  # type: ignore[assignment]
    return x


def _is_written_to(memory: fx.Node) -> bool:
    """Whether an operation in place writes to it or to a view of it."""
    views = [memory]
    while views:
        for user in views.pop().users:
            schema = getattr(user.target, "_schema", None)
            of_no_kind_known = schema is None and user.op == "call_function" and user.target is not operator.getitem
            if of_no_kind_known or (schema is not None and schema.is_mutable):
                return True
            if _is_in_memory_of_others(user):
                views.append(user)
    return False


def _is_in_memory_of_others(x: fx.Node) -> bool:
    """Whether it may be a view of its first argument, or one of several views."""
    if x.target is operator.getitem:
        return True
    schema = getattr(x.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def leave_pins_to_inductor() -> None:
    """Inductor then writes the tensor once, and copies one of 16 bits alone that loops on a CPU write. Called before it
    runs; it takes seconds to import."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    if _pinned in lowering.lowerings:
        return
    copied = lowering.fallback_handler(_pinned, add_to_fallback_set=False)

    def in_memory(x: Any) -> Any:  # an Inductor TensorBox
        if x.get_dtype().itemsize != 2:
            x.realize()
            return x
        if stands(x):
            return x
        # Who reads it in the loop that writes it would read it before it is rounded.
        if x.get_device().type == "cpu":  # whose loops leave out a rounding that is undone
            return copied(x)
        rounded = lowering.make_pointwise(_rounded(ops, x.get_dtype()))(x)
        rounded.realize()
        return rounded

    def stands(x: Any) -> bool:
        """Whether it is what an operation of its own, and no loop, has written."""
        while isinstance(x, (ir.MutableBox, ir.BaseView)):
            x = x.data
        return isinstance(x, ir.ExternKernel)

    lowering.register_lowering(_pinned, type_promotion_kind=None)(in_memory)


def _rounded(ops: Any, dtype: torch.dtype) -> Any:
    """To 16 bits, and back to what loops compute in."""
    return lambda x: ops.to_dtype(ops.to_dtype(x, dtype, use_compute_types=False), dtype)
