"""Losses that compare samples with each other have no gradients by sample.

What the model itself computes of several samples has been seen in its outputs. Behind these the loss's graph is looked
through for products of all pairs, in the first backward pass after each kind of input.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError
from dpfast.modes.counts import behind_losses, check_counts
from dpfast.modes.curvature import check_apart, mark_outputs
from dpfast.modes.running import Pass
from dpfast.taps import Record

_KEEP_GRAPHS = 4  # forward passes; who keeps each one's graph has no last loss

_COLLECTIVES = ("torch.distributed.nn.functional", "torch.distributed._functional_collectives")
"""Modules of collectives that gradients go through. The second's are operators from some torch after 2.8 on."""

_GATHERING = {
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_reduce", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor"),
}
"""What a function of somebody's calls that brings ranks' samples together (SimCLR's ``GatherLayer``)."""

_expected: weakref.WeakSet[Any] = weakref.WeakSet()  # tapped models whose next loss is to be looked at
_goes_on: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose loss was, and that another may be made of as well
_gone_on: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # in so many forward passes before
_of_one: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose losses looked at were of one sample each
_by_units: weakref.WeakSet[Any] = weakref.WeakSet()  # or of units, of which one's samples could meet
_called_on: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # with tensors that have a graph
_have_run: weakref.WeakSet[Any] = weakref.WeakSet()  # tapped models with gradients to come


def expect_loss(model: Any) -> None:
    """The next loss made from the tapped model's output is looked at."""
    _expected.add(model)
    _goes_on.discard(model)


def begin_forward(model: Any, tensors: Sequence[Tensor], *, is_new: bool) -> None:
    """A forward pass of the tapped model begins, with these; ``is_new``: it is looked at, and so is its loss."""
    if is_new:
        expect_loss(model)
    if any(x.grad_fn is not None for x in tensors):  # of what an earlier pass gave, perhaps
        _called_on[model] = calls = _called_on.get(model, 0) + 1
        if calls & (calls - 1) == 0:  # the first, the second, the fourth ...
            expect_loss(model)


def check_expected(losses: Sequence[Tensor], grads: Sequence[Tensor | None], *, is_last: bool) -> None:
    """Looks at losses that gradients are to come from, where these are given, once.

    Args:
        is_last: whether no other loss may be made of the same forward pass and be looked at too.

    Raises:
        UnsupportedModuleError: samples meet in it.
    """
    if not len(_expected):  # nearly always
        return
    try:
        records = _check_for_pairs(losses)
        check_apart(losses, grads, is_last=is_last)
    except UnsupportedModuleError:
        _gone_on.clear()
        raise
    models = {x.tap.taps for x in records} & set(_expected)  # whoever tries again what was refused is told again
    _of_one.update(models - {x.tap.taps for x in records if x.batch_size not in (0, 1)})
    if is_last:
        _done(models)
    else:
        _goes_on.update(models)


def _done(models: Collection[Any]) -> None:
    for model in models:
        _expected.discard(model)
        _gone_on.pop(model, None)


def _check_for_pairs(losses: Sequence[Tensor]) -> Sequence[Record]:
    """The records of the layers that losses come from.

    Raises:
        UnsupportedModuleError: one is made from a product (N, D) @ (D, N) of two tensors that come from tapped layers,
            behind these: similarities of all pairs of samples; or by a collective, from what other ranks have.
    """
    taps, between = behind_losses(losses)
    for node in between:
        collective = _collective(node)
        if collective is not None and any(r.tap.taps in _expected for r in taps):
            raise UnsupportedModuleError(
                f"the loss goes through a collective ({collective}), which brings together "
                "what several ranks have: a sample's gradient depends on those of other ranks, and clipping bounds "
                "nothing; make each sample's loss from that sample alone"
            )
    products = [shape for node in between for shape in _product(node)]
    for record in taps:
        if record.tap.taps not in _expected:
            continue
        n = record.batch_size
        if n is not None and n > 1 and (n, n) in products:
            raise UnsupportedModuleError(
                f"the loss has a product of all pairs of the batch's {n} samples, ({n}, {n}), made from the output of "
                f"{record.tap.layer}: with in-batch negatives a sample's gradient depends on the others, and clipping "
                "bounds nothing; make each sample's loss from that sample alone"
            )
    return taps


def _collective(node: Any) -> str | None:
    """The name of a collective that gradients go through, or of a function of somebody's that calls one."""
    function: Any = getattr(type(node), "_forward_cls", None)
    if function is None or "c10d_functional" in type(node).__name__:
        return None if function is None else type(node).__name__
    if function.__module__ in _COLLECTIVES:
        return f"{function.__name__} of {function.__module__}"
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    called = _GATHERING.intersection(code.co_names) if code is not None else ()
    return f"{function.__name__}, which calls {min(called)}" if called else None


def note_forward(
    model: Any,
    outputs: Sequence[Any],
    ended: Pass,
    parted: Mapping[int, Sequence[int]] | None,
    mixed: Collection[int | str],
) -> None:
    """The tapped model has given outputs that gradients may come to.

    Args:
        parted, mixed: as ``curvature.mark_outputs``'.
    """
    _have_run.add(model)
    if model in _goes_on:
        _goes_on.discard(model)
        _gone_on[model] = _gone_on.get(model, 0) + 1
        if _gone_on[model] == _KEEP_GRAPHS:
            _done({model})
    n = ended.size
    if (n is not None and n > 1 and model in _of_one) or (ended.units is None and model in _by_units):
        _expected.add(model)
        _of_one.discard(model)
        _by_units.discard(model)
    if model in _expected and n is not None and parted is not None:
        whose = None if ended.units is None else ended.units.of_samples()
        if whose is not None:
            _by_units.add(model)
        mark_outputs(outputs, range(n) if whose is None else whose, model.batch_dim, parted, mixed, ended.graph)


def check_for_counts(loss: Tensor) -> None:
    """As ``counts.check_counts``, where some tapped model has run."""
    if len(_have_run):
        check_counts(loss)


def _product(node: Any) -> list[tuple[int, ...]]:
    """The shape of the matrix that the node's operation made of two matrices with gradients, if it did."""
    name = type(node).__name__
    if name not in ("MmBackward0", "BmmBackward0") or any(following is None for following, _ in node.next_functions):
        return []
    # What it has saved is not asked: that would run checkpointed parts of the model again.
    *batches, rows, columns = node._input_metadata[0].shape
    return [(int(rows), int(columns))] if batches in ([], [1]) else []


def refuse_mixed(model: nn.Module, outputs: Sequence[Any], mixed: Mapping[int | str, str], batch_dim: int) -> None:
    """No gradient may come to these of a forward pass's outputs, by number, and of what it has left in attributes of
    the model's modules, by name.

    Args:
        mixed: what is wrong with each.
    """
    for key, why in mixed.items():
        x = outputs[key] if isinstance(key, int) else reduce(_attribute, key.split("."), model)
        if isinstance(x, Tensor) and x.requires_grad:
            where = f"output {key} of the model" if isinstance(key, int) else f"{key}, an attribute of the model"
            x.register_hook(partial(_refuse, f"{where}, {tuple(x.shape)}", why, _TIME_FIRST if batch_dim == 0 else ""))


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name, None)


_TIME_FIRST = ", or batch_first=False, where samples are in dimension 1"


def _refuse(what: str, why: str, otherwise: str, grad: Tensor | None) -> None:
    if grad is None:  # it came to another output of the same operation
        return
    raise UnsupportedModuleError(
        f"the loss was made from {what}, and {why} (as forward passes tell in which other samples stand beside a "
        "sample), so its gradient is no sum of samples' own, and clipping bounds nothing; make each sample's loss from "
        f"that sample alone{otherwise}"
    )
