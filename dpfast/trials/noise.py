"""Numbers that stand in looks for those of this moment, which may hide something: noise, and others for parameters that
are mostly zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dpfast.trials.unsharded import whole_stand_in

NOISE = 0.125
_NUMBERS = 1021  # of noise, over and over: a prime, so that no two rows are likely to have the same
_ZERO = 2.0**-10


def stand_ins(model: nn.Module) -> dict[int, Any]:
    """Other numbers for parameters that are mostly zeros, and for those of which a rank has a part, by the parameters'
    ids."""
    found: dict[int, Any] = {}
    with torch.no_grad():
        for p in model.parameters():
            if p.is_meta or not p.is_floating_point():  # no numbers
                continue
            if hasattr(p, "device_mesh"):
                whole = torch.empty(p.shape, device=p.device_mesh.device_type)
                found[id(p)] = whole_stand_in(p, noise_like(whole, len(found)) / NOISE)
            elif is_traceable_wrapper_subclass(p):
                continue  # quantised: it need not know more than what its layer does with it
            elif 2 * int(torch.count_nonzero(p.abs() > _ZERO)) <= p.numel() > 0:
                found[id(p)] = nn.Parameter(p + noise_like(p, len(found)), requires_grad=p.requires_grad)
    return found


def noise_like(like: Tensor, seed: int) -> Tensor:
    """Noise of that shape; the same wherever and whenever it is asked for."""
    numel = like.numel()
    numbers = torch.randn(min(numel, _NUMBERS), generator=torch.Generator().manual_seed(seed % 2**32)) * NOISE
    noise = torch.empty(like.shape, dtype=like.dtype, device=like.device)  # no view of anything
    if numel:
        numbers, flat, whole = numbers.to(noise), noise.view(-1), numel - numel % len(numbers)
        flat[:whole].view(-1, len(numbers)).copy_(numbers)
        flat[whole:].copy_(numbers[: numel - whole])
    return noise
