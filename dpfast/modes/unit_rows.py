"""What a layer saw, row by row of the units' tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpfast.errors import UnsupportedModuleError
from dpfast.taps import Activations, Record, Rows, batch_in_front, tokens_in


def as_tokens(
    record: Record, activations: Activations, backprops: Any, place: int | Rows, units: Any
) -> tuple[Activations, Any]:
    """What the layer saw with a row for each token, (R, ...), in the place of samples.

    Raises:
        UnsupportedModuleError: its rows cannot be traced to units.
    """

    def rows(x: Tensor) -> Tensor:
        found = tokens_in(x, place, units.shape)
        if found is None:
            raise UnsupportedModuleError(
                f"{record.tap.layer}: {tuple(x.shape)} has no row for each of ids {units.ids.shape}"
            )
        return found

    why = units.untraced(record, backprops)
    if why is not None:
        raise UnsupportedModuleError(
            f"{record.tap.layer}: whose its rows are cannot be told: {why}. Freeze it, or give ids (N,) and each unit "
            "samples of its own (a document a row, padded)"
        )
    if record.as_is:
        return activations, backprops
    if record.picked is not None:
        return batch_in_front(activations, backprops, place)
    activations = activations.map(rows)
    activations.batch_dim = 0
    return activations, tuple(map(rows, backprops))
