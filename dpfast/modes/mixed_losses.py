"""Losses that compare samples with each other have no gradients by sample.

What the model itself computes of several samples has been seen in its outputs. Behind these the loss's graph is looked
through for products of all pairs, in the first backward pass after each kind of input.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from dpfast.errors import UnsupportedModuleError

_expected: weakref.WeakSet[Any] = weakref.WeakSet()  # tapped models whose next loss is to be looked at


def expect_loss(model: Any) -> None:
    """The next loss made from the tapped model's output is looked at."""
    _expected.add(model)


def check_for_pairs(loss: Tensor) -> None:
    """Raises UnsupportedModuleError where the loss is made from a product (N, D) @ (D, N) of two tensors that come from
    tapped layers, behind these: similarities of all pairs of samples."""
    if not len(_expected):  # nearly always
        return
    nodes, seen, taps = [loss.grad_fn], set(), []
    products: list[tuple[int, ...]] = []
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        record = getattr(node, "record", None)  # of a tap's node
        if record is not None and hasattr(record, "tap"):
            taps.append(record)
            continue
        products += _product(node)
        nodes.extend(following for following, _ in node.next_functions)
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
    for record in taps:
        _expected.discard(record.tap.taps)


def _product(node: Any) -> list[tuple[int, ...]]:
    """The shape of the matrix that the node's operation made of two matrices with gradients, if it did."""
    name = type(node).__name__
    if name not in ("MmBackward0", "BmmBackward0") or any(following is None for following, _ in node.next_functions):
        return []
    # What it has saved is not asked: that would run checkpointed parts of the model again.
    *batches, rows, columns = node._input_metadata[0].shape
    return [(int(rows), int(columns))] if batches in ([], [1]) else []


def refuse_mixed(number: int, shape: tuple[int, ...], why: str, grad: Tensor | None) -> None:
    """A hook on an output of the model: a gradient came to it.

    Args:
        number: of the output, whose tensors are counted as they stand in tuples and dicts.
        why: what is wrong with it.
    """
    if grad is None:  # it came to another output of the same operation
        return
    raise UnsupportedModuleError(
        f"the loss was made from output {number} of the model, {shape}, and {why} (as forward passes with one sample "
        "exchanged tell: similarities of all pairs, in-batch negatives), so its gradient is no sum of samples' own, "
        "and clipping bounds nothing; make each sample's loss from that sample alone"
    )
