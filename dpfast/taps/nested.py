"""Arguments of functions, in which tensors may stand anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATOMS = frozenset((int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device))
"""What nearly all other arguments are."""


def each_tensor(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``x`` with ``function(tensor)`` in the place of each tensor in it."""
    kind = type(x)
    if kind in _ATOMS:
        return x
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, (tuple, list)):
        if _ATOMS.issuperset(map(type, x)):
            return x
        # Of what stands here, nearly always tensors and atoms, no call is made.
        parts = [y if type(y) in _ATOMS else each_tensor(y, function) for y in x]
        return kind(*parts) if hasattr(x, "_fields") else kind(parts)
    if isinstance(x, dict):
        return {k: y if type(y) in _ATOMS else each_tensor(y, function) for k, y in x.items()} if x else x
    return x
