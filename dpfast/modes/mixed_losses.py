"""Losses that compare samples with each other have no gradients by sample.

What the model itself computes of several samples has been seen in its outputs. Behind these the loss's graph is looked
through for products of all pairs, in the first backward pass after each kind of input; and in every one for a mean over
all targets that are not left out, whose divisor is the other samples' too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpfast.arithmetic import in_cuda_graph
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.modes.curvature import check_apart, mark_outputs
from dpfast.modes.running import Pass
from dpfast.taps import Record, is_of_tap, nodes_behind

_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("LogSoftmax", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Clone", "ToCopy")
)
_NEAR = 32  # so many operations in front of the loss
_KEEP_GRAPHS = 4  # forward passes; who keeps each one's graph has no last loss

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
            behind these: similarities of all pairs of samples.
    """
    taps, between = _behind(losses)
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
    """Raises UnsupportedModuleError where the loss is ``F.cross_entropy``'s mean over the targets that are not left out
    (``ignore_index``), or that have weights, of samples that have different numbers of them."""
    if not len(_have_run):
        return
    for node in itertools.islice(nodes_behind([loss.grad_fn], lambda node: not hasattr(node, "record")), _NEAR):
        if type(node).__name__ in _MEANS and node._saved_reduction == 1:
            _check_counts(loss, node)


def _check_counts(loss: Tensor, mean: Any) -> None:
    target, weight, left_out = mean._saved_target, mean._saved_weight, mean._saved_ignore_index
    if isinstance(target, FakeTensor):
        return
    counted = target != (left_out - 2**64 if left_out >= 2**63 else left_out)  # torch gives it without its sign
    picks = _picks(mean)
    if in_cuda_graph():
        if not any(record.tap.taps.enabled for record in _behind([loss])[0]):  # somebody's ordinary loss
            return
        raise StateError(
            "the loss is F.cross_entropy's mean, and the step is captured in a CUDA graph: no replay could tell "
            "whether targets are left out (ignore_index), with which samples would share a divisor; take "
            "reduction='none' and the mean of what it gives, each sample's own where it has several targets"
        )
    if weight is None and picks is None and bool(counted.all()):
        return
    shares = counted.double() if weight is None else weight.double()[target.where(counted, 0)] * counted
    for taps, n, valid in {(r.tap.taps, r.batch_size, r.valid) for r in _behind([loss])[0]}:
        whose = _whose(picks, n, taps.batch_dim) if picks is not None and n else None
        if not taps.enabled or not n or (whose is None and shares.numel() % n):
            continue
        if whose is not None and whose.numel() == shares.numel():
            of_samples = shares.new_zeros(n).index_add(0, whose.flatten(), shares.flatten())
        else:
            of_samples = shares.reshape(n, -1).sum(1) if taps.batch_dim == 0 else shares.reshape(-1, n).sum(0)
        if valid is not None and valid.shape == of_samples.shape:
            of_samples = of_samples[valid]
        least, most = of_samples.aminmax() if len(of_samples) else (torch.ones(()), torch.ones(()))
        if bool(most - least > 1e-6 * most):
            raise UnsupportedModuleError(
                f"the loss is a mean over the targets of all {n} samples that are picked and not left out "
                "(ignore_index), or over their weights, and the samples have different numbers of them "
                f"({float(least):g} to {float(most):g}): a sample's gradient in it changes with another sample, by "
                "whose it is divided, and clipping bounds nothing; take reduction='none', each sample's own mean, and "
                "the mean of these"
            )


def _picks(mean: Any) -> Any:
    """The node of the operation that picked the rows whose mean this is, if views alone are between."""
    node = mean
    for _ in range(_NEAR):
        node = node.next_functions[0][0] if node.next_functions else None
        name = type(node).__name__
        if name in ("IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0"):
            return node
        if name not in _VIEWS:
            return None
    return None


def _whose(picks: Any, n: int, batch_dim: int) -> Tensor | None:
    """The samples of the rows (..., classes) that were picked; None where that is not known."""
    masked = picks._saved_mask if type(picks).__name__ == "MaskedSelectBackward0" else None
    *sizes, _ = picks._saved_self_sym_sizes if masked is None else picks._saved_self.shape
    if len(sizes) > batch_dim and sizes[batch_dim] == n:
        whose = torch.arange(n).view(-1, *[1] * (len(sizes) - batch_dim - 1)).expand(sizes)
    elif len(sizes) == 1 and sizes[0] % n == 0:
        whose = torch.arange(sizes[0]) // (sizes[0] // n) if batch_dim == 0 else torch.arange(sizes[0]) % n
    else:
        return None
    if masked is not None:
        return whose.to(masked.device)[masked[..., 0]] if masked.shape == (*sizes, 1) else None
    if type(picks).__name__ == "IndexSelectBackward0":
        dim, index = picks._saved_dim, picks._saved_index
        return whose.to(index.device).index_select(dim, index) if 0 <= dim < len(sizes) else None
    indices = picks._saved_indices
    device = next(x.device for x in indices if x is not None)
    if sum(x.dim() if x is not None and x.dtype is torch.bool else 1 for x in indices) > len(sizes):
        return None
    return whose.to(device)[tuple(slice(None) if x is None else x for x in indices)]


def _behind(losses: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """The records of the tapped layers that are next to the losses in their graph, and the nodes between."""
    taps, between = [], []
    for node in nodes_behind((loss.grad_fn for loss in losses), lambda node: not is_of_tap(node)):
        if is_of_tap(node):
            taps.append(node.record)
        else:
            between.append(node)
    return taps, between


def _product(node: Any) -> list[tuple[int, ...]]:
    """The shape of the matrix that the node's operation made of two matrices with gradients, if it did."""
    name = type(node).__name__
    if name not in ("MmBackward0", "BmmBackward0") or any(following is None for following, _ in node.next_functions):
        return []
    # What it has saved is not asked: that would run checkpointed parts of the model again.
    *batches, rows, columns = node._input_metadata[0].shape
    return [(int(rows), int(columns))] if batches in ([], [1]) else []


def refuse_mixed(model: nn.Module, outputs: Sequence[Any], mixed: Mapping[int | str, str]) -> None:
    """No gradient may come to these of a forward pass's outputs, by number, and of what it has left in attributes of
    the model's modules, by name.

    Args:
        mixed: what is wrong with each.
    """
    for key, why in mixed.items():
        x = outputs[key] if isinstance(key, int) else reduce(_attribute, key.split("."), model)
        if isinstance(x, Tensor) and x.requires_grad:
            where = f"output {key} of the model" if isinstance(key, int) else f"{key}, an attribute of the model"
            x.register_hook(partial(_refuse, f"{where}, {tuple(x.shape)}", why))


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name, None)


def _refuse(what: str, why: str, grad: Tensor | None) -> None:
    if grad is None:  # it came to another output of the same operation
        return
    raise UnsupportedModuleError(
        f"the loss was made from {what}, and {why} (as forward passes tell in which other samples stand beside a "
        "sample), so its gradient is no sum of samples' own, and clipping bounds nothing; make each sample's loss from "
        "that sample alone"
    )
