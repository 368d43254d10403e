"""Batches of one size: padded with zeros, with a mask that tells samples from padding."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from dpfast.errors import InputError

_FROZEN = (Number, str, bytes, range, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What has no parts that could change: a capture is one for each value."""


def _is_numpys(x: object) -> bool:
    """Whether it is a number of NumPy's, no array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic)


class Batch:
    """A batch, its tensors apart from what else is in it.

    Raises:
        InputError: something that may hold tensors, of which nobody here knows.
    """

    def __init__(self, leaves: Sequence[Any], structure: TreeSpec):
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.tensors: list[Tensor] = [leaves[i] for i in self.places]
        self.others = [None if isinstance(x, Tensor) else x for x in leaves]
        for x in self.others:
            if not (x is None or isinstance(x, _FROZEN) or _is_numpys(x)):
                raise InputError(
                    f"the batch holds a {type(x).__name__}, and what is in it would be taken as it was in the first "
                    "batch: give its tensors themselves, in tuples, lists or dicts (dict(batch), "
                    "torch.as_tensor(array)), or register its class with torch.utils._pytree.register_pytree_node"
                )
        self.structure = structure

    @classmethod
    def like(cls, other: Batch, tensors: Sequence[Tensor]) -> Batch:
        """The other with these tensors."""
        batch = copy.copy(other)
        batch.tensors = list(tensors)
        return batch

    def copies(self) -> list[Tensor]:
        """Of its tensors, for a look: losses and forwards may write to what they are given."""
        return [x.detach().clone() for x in self.tensors]

    def of(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The batch with other tensors."""
        leaves = list(self.others)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, self.structure)


def num_samples(tensors: Sequence[Tensor]) -> int:
    """How many samples all tensors of a batch have in their first dimension.

    Raises:
        InputError: there is no tensor, or not all have as many.
    """
    sizes = [x.shape[0] if x.dim() else None for x in tensors]
    if not sizes or any(size != sizes[0] for size in sizes) or sizes[0] is None:
        raise InputError(
            f"the batch's tensors {[tuple(x.shape) for x in tensors]} must all have its samples in their first "
            "dimension; what is the same for all samples belongs into losses or the model"
        )
    return sizes[0]


def padded(tensors: Sequence[Tensor], whose: Tensor, size: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """(tensors, whose) of ``size`` samples each, contiguous, as often as it takes; the last is filled up with zeros.

    Args:
        whose: which samples are valid, (N,) bool, or their units, (N,) int64; what is added is not, and nobody's.
    """
    n = len(whose)
    if n == size:
        *some, mask = (x.detach().contiguous() for x in (*tensors, whose))
        yield some, mask
        return
    for start in range(0, n, size):
        *some, mask = (x.detach()[start : start + size].contiguous() for x in (*tensors, whose))
        missing = size - len(mask)
        if missing:
            some = [torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in some]
            mask = torch.cat([mask, mask.new_full((missing,), False if mask.dtype == torch.bool else -1)])
        yield some, mask
