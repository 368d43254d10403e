"""Whether what a forward pass keeps of its samples changes what the next one gives.

A codebook that follows the batches, a queue of negatives, a running mean: with these a sample moves the sums of later
steps, in which it is not, and no clipping bounds by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps import kept
from dpfast.taps.gathered import following_model
from dpfast.taps.inputs import results_in
from dpfast.taps.layout import Place
from dpfast.taps.seen import Key, Run
from dpfast.taps.tap import Tap
from dpfast.taps.trial import Trial
from dpfast.taps.witness import Witness, copied, leaves_of_copy

_NEXT = 2  # passes in which it may show: what is kept may wait for one before it is used


def carried(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    leaves: Sequence[Any],
    exchanged: Sequence[Sequence[Any]],
    places: dict[Key, Place],
    size: int,
    stand_ins: dict[int, Any],
    again: Callable[[], None],
) -> list[str]:
    """The names of buffers and attributes that differ with samples of a pass, where one of the next two, on the same
    samples, does too; none where it does not, or where nothing is kept.

    Args:
        leaves: the inputs, of ``size`` samples. exchanged: with some of them exchanged, and with others.
            Others: as ``witness.run_on``'s.
    """

    def passes(first: Sequence[Any]) -> tuple[dict[str, Any], list[Any]] | None:
        copy, own = copied(model, taps, leaves_of_copy(model) | stand_ins)
        witnesses = [Witness.of(tap, i, Run(), places, size) for i, tap in enumerate(own)]

        def forward(some: Sequence[Any]) -> list[Any]:
            again()
            some = trial.as_called([x.clone() if isinstance(x, Tensor) else x for x in some])
            for witness in witnesses:
                witness.called = trial, some
            args, kwargs = trial.unflatten(some)
            with following_model(witnesses[0].taps, copy, some), torch.enable_grad():  # as in training
                return [x.detach() if isinstance(x, Tensor) else x for x in results_in(copy(*args, **kwargs))]

        before = kept.held(copy)
        forward(first)
        now = kept.held(copy)
        if kept.are_same(before, now):
            return None
        kept_by_it = {name: x.clone() if isinstance(x, Tensor) else x for name, (x, *_) in now.items()}
        return kept_by_it, [y for _ in range(_NEXT) for y in forward(leaves)]

    one = passes(leaves)
    if one is None:
        return []
    for some in exchanged:
        other = passes(some)
        if other is None or _same(one[1], other[1]):
            continue
        repeated = passes(leaves)
        if repeated is None or not _same(one[1], repeated[1]):
            return []
        return [name for name, x in one[0].items() if not _same([x], [other[0].get(name)])] or ["what it keeps"]
    return []


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """To the bit."""
    pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(some, others, strict=False) if _is_number(x, y)]
    return len(some) == len(others) and all(
        x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs
    )


def _is_number(*some: Any) -> bool:
    return all(isinstance(x, (Tensor, int, float)) for x in some)
