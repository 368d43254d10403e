"""Whether each loss is its own sample's alone: a step that the eager mode cannot see, because its loss comes from
outside, is a function here, and is asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpfast.compiled.batches import Batch
from dpfast.errors import InputError
from dpfast.taps import same_random_numbers, taps_suspended


def check_apart(losses: Callable[..., Tensor], model: object, batch: Batch) -> None:
    """Exchanges every other sample, and each half of them, for their neighbours: the losses of the others must stay.
    Evidence on one batch, not a proof.

    Raises:
        InputError: they do not, though the same batch gives the same losses again.
    """
    n = len(batch.tensors[0])
    with torch.no_grad(), taps_suspended(), same_random_numbers() as again:

        def of(exchanged: Tensor) -> Tensor:
            again()
            rows = torch.where(exchanged, torch.arange(n).roll(1), torch.arange(n))
            return losses(model, *batch.of([x[rows.to(x.device)] for x in batch.tensors]))

        nobody = torch.zeros(n, dtype=torch.bool)
        base = of(nobody)
        if not (isinstance(base, Tensor) and base.shape == (n,) and base.is_floating_point()):
            return  # another error's
        for mask in (torch.arange(n) % 2 == 0, torch.arange(n) < n / 2):
            for exchanged in (mask, ~mask):
                if not _same(base, of(exchanged), ~exchanged) and _same(base, of(nobody), ~nobody):
                    raise InputError(
                        "losses(model, *batch): a sample's loss changes with the other samples of the batch, so "
                        "clipping bounds nothing. Compute each loss from its own sample alone: no mean, no weights, no "
                        "negatives and no order over the batch"
                    )


def _same(one: Tensor, two: Tensor, rows: Tensor) -> bool:
    """But for rounding, which an operation may do otherwise for other values (an attention mask of ones)."""
    rows = rows.to(one.device)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one[rows], two[rows], rtol=tolerance, atol=0.0, equal_nan=True)
