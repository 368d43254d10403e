"""What the engine's mode "dpfast_compiled" needs beside ``compile_step``: losses from a criterion, padded batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from dpfast.compiled import Batch, num_samples, padded
from dpfast.errors import InputError


def graph_size(expected_batch_size: float) -> int:
    """Samples of a graph for Poisson batches: two standard deviations more than expected, so that two draws of a
    hundred take a second pass."""
    return math.ceil(expected_batch_size + 2.0 * math.sqrt(expected_batch_size))


def losses_of(criterion: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``losses(model, *inputs, target) -> (N,)`` from a criterion with a ``reduction``, as torch's.

    Raises:
        InputError: a criterion without ``reduction``.
    """
    if not hasattr(criterion, "reduction"):
        raise InputError(
            f"criterion {type(criterion).__name__} has no reduction= that could be 'none'; give one of torch's, or "
            "take dpfast.compile_step with losses of your own"
        )
    by_sample: Any = copy.copy(criterion)
    by_sample.reduction = "none"
    added_up = criterion.reduction in ("sum", "batchmean")  # of a sample's losses

    def losses(model: nn.Module, *batch: Any) -> Tensor:
        found: Tensor = by_sample(model(*batch[:-1]), batch[-1])
        if found.dim() < 2:
            return found
        return found.flatten(1).sum(1) if added_up else found.flatten(1).mean(1)

    return losses


class PaddedCollate:
    """A collate function whose batches are ``(batch, valid)``: padded with zeros to the next multiple of ``size``.

    Args:
        collate: the loader's own; its tensors have their samples first.
        size: of the graph.
    """

    def __init__(self, collate: Callable[[Any], Any], size: int):
        self.collate, self.size = collate, size

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, Tensor]:
        batch = Batch(*tree_flatten(self.collate(samples)))
        n = num_samples(batch.tensors)
        parts = list(padded(batch.tensors, torch.ones(n, dtype=torch.bool), self.size))
        if not parts:
            return batch.of(batch.tensors), torch.ones(0, dtype=torch.bool)
        pieces = zip(*(some for some, _ in parts), strict=True)
        return batch.of([torch.cat(some) for some in pieces]), torch.cat([mask for _, mask in parts])


def padded_loader(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """The loader, with :class:`PaddedCollate` around its collate function; another object on the same data."""
    other = copy.copy(loader)
    other.collate_fn = PaddedCollate(loader.collate_fn, size)
    return other
