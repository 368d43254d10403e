"""Attention with its scores written out, a part of them at a time.

The fused kernels of a GPU, which looks do not take (``same_kernels``), keep no scores; written out, those of all layers
would be most of what a look holds. So a few samples' or heads' are computed at a time, and again in the backward pass.
Not within a model's own checkpoint: it holds one block's scores at a time by itself, and its forward runs again where
the mode is not there (in ``torch.autograd.grad``, or a GPU's thread), which must save what it saved before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dpfast.taps import saves_as_torch_does

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SCORES = 2**24  # at once: 64 MiB in fp32, a few times over


class InParts(TorchFunctionMode):
    """Within it ``F.scaled_dot_product_attention`` goes by parts, which follow from the shapes alone. Its samples and
    heads are batches to it, so none sees another. To be entered before the modes that look at what a model calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not saves_as_torch_does():
            return func(*args, **kwargs)
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        tensors = [given.pop(name, None) for name in _NAMES[:4]]
        if not all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors):
            return func(*args, **kwargs)
        return _by_parts(tensors, given, 0)


def _by_parts(tensors: Sequence[Any], options: dict[str, Any], dim: int) -> Tensor:
    """In parts along that dimension, then along those behind it; the last two are the attention's own."""
    query, key, value, _ = tensors
    scores, rank = query.shape[:-1].numel() * key.shape[-2], query.dim()
    if scores <= _SCORES or dim >= rank - 2 or not rank == key.dim() == value.dim():
        return checkpoint(_attend, tensors, options, use_reentrant=False)
    sizes = {x.shape[dim] for x in (query, key, value)} - {1}
    groups = min(sizes, default=1)  # several heads may share one of keys
    if groups == 0 or any(size % groups for size in sizes):
        return _by_parts(tensors, options, dim + 1)
    number = max(1, groups * _SCORES // scores)
    starts = range(0, groups, number)
    parts = [[_part(x, dim - rank, groups, start, number) for x in tensors] for start in starts]
    return torch.cat([_by_parts(part, options, dim + 1) for part in parts], dim)


def _part(x: Tensor | None, dim: int, groups: int, start: int, number: int) -> Tensor | None:
    """What it has of these groups; the dimension counts from the last, as a mask may have fewer."""
    if x is None or x.dim() < -dim or x.shape[dim] == 1:
        return x
    each = x.shape[dim] // groups
    return x.narrow(dim, start * each, min(number, groups - start) * each)


def _attend(tensors: Sequence[Any], options: dict[str, Any]) -> Tensor:
    with torch._C.DisableTorchFunction():  # in the backward pass the mode may be there
        return F.scaled_dot_product_attention(*tensors, **options)
