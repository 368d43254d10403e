"""Whether a loss spreads the model's outputs over a dimension as long as the batch, beside what has no gradient.

Outputs (N, 1) and targets (N,) give (N, N): each sample's loss has the targets of all, in numbers that no derivative by
outputs tells from constants. A table or positions that all samples share may be as long as the batch by accident; so
this is said, not refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_BETWEEN = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Maximum", "Minimum", "MseLoss", "SmoothL1Loss", "HuberLoss"),
        *("SoftMarginLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Where"),
    )
    for number in (0, 1)
)


def spread_over_samples(nodes: Iterable[Any], n: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes before and after, where an operation of two tensors spreads one that has a dimension of ``n`` over
    another of ``n``, and the other tensor has no gradient."""
    for node in nodes:
        if type(node).__name__ not in _BETWEEN or all(x is not None for x, _ in node.next_functions):
            continue
        for operand, number in node.next_functions:
            if operand is None:
                continue
            after = _shape(node, 0)
            if type(operand).__name__ == "ExpandBackward0":  # as torch's losses broadcast
                after = _shape(operand, 0)
                operand, number = operand.next_functions[0]
            before = _shape(operand, number)
            if n in before and n in _spread(before, after):
                return before, after
    return None


def _spread(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    """The lengths over which it is spread."""
    new = len(after) - len(before)
    return [size for d, size in enumerate(after) if size > 1 and (d < new or before[d - new] == 1)] if new >= 0 else []


def _shape(node: Any, number: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)
