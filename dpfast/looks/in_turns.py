"""One forward pass of a copy on a few samples over and over, of a model that does not run on fake tensors.

What is padded or cut to the longest of them is as long for any number of them then: what differs between two such runs
follows the batch, and not who is in it. What has no samples goes as it would go in earnest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.looks.run_on import copied
from dpfast.taps import Call, Place, Tap, begun_anew, following_model
from dpfast.trials import (
    Dependence,
    ShapeTap,
    Trial,
    Writes,
    first_samples,
    leaves_of_copy,
    put_back,
    same_random_numbers,
)

_SIZES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def told_apart(sizes: Iterable[int]) -> list[int]:
    """Two numbers of samples of which none of these sizes is a multiple; fewer where there are none."""
    found = {size for size in sizes if size}
    return [p for p in _SIZES if all(size % p for size in found)][:2]


@begun_anew
def calls_in_turns(
    model: nn.Module,
    taps: Sequence[Tap],
    leaves: Sequence[Any],
    trial: Trial,
    dims: Sequence[int | None],
    few: int,
    size: int,
    places: Mapping[Any, Place],
) -> list[list[tuple[Any, Call | bool]]]:
    """As ``fake_run.calls_in_forward``, of a forward on so ``few`` of the samples, in turns.

    Args:
        leaves, trial: the inputs, flattened. dims: of each, that of its samples. size: so many run.
        places: where taps have their samples, as far as that is known, for rows that are picked out of what they give.
    """
    with same_random_numbers():
        some = [first_samples(first_samples(x, d, few), d, size) for x, d in zip(leaves, dims, strict=True)]
        inputs = trial.as_called([x.clone() if isinstance(x, Tensor) else x for x in some])
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        samples = [x for x, dim in zip(inputs, dims, strict=True) if isinstance(x, Tensor) and dim is not None]
        dependence = Dependence(tensors, samples, size, lambda _: None)
        original = model
        model, copies = copied(model, taps, leaves_of_copy(model))
        with put_back(original):
            trial.run_passes(model, inputs)
            probes = [ShapeTap.of(tap, size, dependence, (trial, inputs)) for tap in copies]
            for i, probe in enumerate(probes):
                probe.at = {rank: place for (number, rank), place in places.items() if number == i}
            args, kwargs = trial.unflatten(inputs)
            # No bits are compared, and what has no shape of the batch is to have none on the way.
            following = following_model(copies[0].taps, model, inputs, trial=False)
            with Writes(), following, torch.enable_grad(), dependence:
                model(*args, **kwargs)
        return [probe.told() for probe in probes]
