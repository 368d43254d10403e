"""What inputs show of where one unit's tokens end and another's begin: positions, document numbers, masks, offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def steps(x: Tensor, ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """From each token's number to the next one's: within units, and from one unit to another. ids: samples in front."""
    ids, x = ids.flatten(1), x.movedim(dim, 0).flatten(1).cpu()
    same = ids[:, 1:] == ids[:, :-1]
    step = x[:, 1:] - x[:, :-1]
    return step[same & (ids[:, 1:] >= 0)], step[~same]


def shows(x: Tensor, raw: Tensor, dim: int) -> Any:
    """What an input shows of where units end: one that shows something else may bring units together."""
    ids = raw.movedim(dim, 0)
    whole = x.dtype != torch.bool and not x.is_floating_point()
    if whole and x.shape == raw.shape:  # positions, document numbers
        within, between = steps(x, ids, dim)
        return tuple(s for s in (0, 1) if bool((within == s).all()) and not bool((between == s).any()))
    if whole and x.dim() == 1:  # where units start in one long row
        starts = (ids.flatten()[1:] != ids.flatten()[:-1]).nonzero().flatten() + 1
        return bool(torch.isin(starts, x.cpu()).all())
    t = ids.shape[1]
    if not whole and ids.dim() == 2 and x.dim() > 2 and x.shape[-2:] == (t, t) and x.shape[0] in (1, len(ids)):
        allowed = (x if x.dtype == torch.bool else x == 0).view(len(x), -1, t, t)
        between = (ids[:, :, None] != ids[:, None, :])[:, None].to(x.device)
        return bool((allowed & between).any()), bool((~allowed & between).any())
    return None
