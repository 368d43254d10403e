"""Functions that keep rows as they are: which rows of a tensor stand where in what they give of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def by_index(numbers: Tensor, result: Tensor, index: Any) -> Tensor | None:
    parts = index if isinstance(index, tuple) else (index,)
    if any(x is Ellipsis for x in parts):  # it stands for the last dimension too
        return None
    taken = sum(0 if x is None else x.dim() if is_mask(x) else 1 for x in parts)
    if taken > numbers.dim() and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        index = parts[:-1]  # the last dimension, whole
    try:
        return numbers[index]
    except (IndexError, TypeError):
        return None


def is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def _by_select(numbers: Tensor, result: Tensor, dim: int, index: Tensor) -> Tensor | None:
    return numbers.index_select(dim, index) if 0 <= dim < numbers.dim() else None


def _parted(numbers: Tensor, result: Any, sizes: Any, dim: int = 0) -> Any:
    return numbers.split(sizes, dim) if 0 <= dim < numbers.dim() else None


def _repeated(numbers: Tensor, result: Tensor, times: Any, dim: int = -1, **_: Any) -> Tensor | None:
    return numbers.repeat_interleave(times, dim) if 0 <= dim < numbers.dim() else None


def _transposed(numbers: Tensor, result: Tensor, one: int, two: int) -> Tensor | None:
    return numbers.transpose(one, two) if min(one, two) >= 0 and max(one, two) < numbers.dim() else None


def _permuted(numbers: Tensor, result: Tensor, *dims: Any) -> Tensor | None:
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    last = numbers.dim()
    return numbers.permute(*order[:last]) if sorted(order[:last]) == list(range(last)) else None


def _selected(numbers: Tensor, result: Tensor, dim: int, index: int) -> Tensor | None:
    return numbers.select(dim, index) if 0 <= dim < numbers.dim() else None


def _packed(numbers: Tensor, result: Any, lengths: Tensor, batch_first: bool) -> Any:
    return PACK(numbers.unsqueeze(-1), lengths, batch_first)[0].squeeze(-1), None


def _viewed(numbers: Tensor, result: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    lead = result.shape[:-1]
    return numbers.reshape(lead) if lead.numel() == numbers.numel() else None


PACK: Any = torch._VF._pack_padded_sequence  # what pack_padded_sequence calls
PICK: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: by_index,
    Tensor.index_select: _by_select,
    torch.index_select: _by_select,
    Tensor.split: _parted,
    torch.split: _parted,
    Tensor.repeat_interleave: _repeated,
    torch.repeat_interleave: _repeated,
}
ENTRIES = frozenset((*PICK, PACK))  # what rows are picked by, whole numbers too
PUT = frozenset((Tensor.__setitem__, Tensor.masked_scatter, Tensor.masked_scatter_, torch.masked_scatter))
_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "to", "type_as")
KEEP = PICK | {
    f: _viewed for name in (*_VIEWS, "float", "half", "bfloat16", "double") for f in (getattr(Tensor, name),)
}
KEEP |= dict.fromkeys((torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.clone), _viewed)
KEEP |= dict.fromkeys((Tensor.transpose, torch.transpose), _transposed) | {PACK: _packed}
KEEP |= dict.fromkeys((Tensor.permute, torch.permute), _permuted)
KEEP |= dict.fromkeys((Tensor.select, torch.select), _selected)
WHOLE_ROWS = frozenset(KEEP)
"""All of these."""

ASK = frozenset(
    (
        *(Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference, Tensor._is_view),
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
        *(Tensor.requires_grad.__get__, Tensor._version.__get__),  # type: ignore[attr-defined]
    )
)
"""They give no tensor and no number out of one, and are called more often than all others: modes let them pass."""
