"""What a graph computes with."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Quantised weights, and other tensors that are made of some, as these."""
    found: list[Tensor] = []
    for x in tensors:
        if is_traceable_wrapper_subclass(x):
            found += plain(getattr(x, name) for name in x.__tensor_flatten__()[0])
        else:
            found.append(x)
    return found
