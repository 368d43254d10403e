"""Whether all ranks clip to the same: a few numbers that ride in an all-reduce which is there anyway."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dpfast.errors import StateError

DISAGREEMENT = (
    "ranks disagree on what is clipped to what, or on which step this is: max_grad_norm, the clipper, loss_reduction, "
    "whether samples are clipped or units (and per_unit), by what names the model's inputs come, "
    "the trainable parameters, the optimizer's noise_multiplier, expected batch size and secret, the length and the "
    "sample rate of the loader, and the number of its batches that were taken and of backward passes before each step "
    "must be the same on all of them (with BatchMemoryManager the latter is not); no gradient was released"
)

_PARTS, _LARGEST = 8, 2**6 - 1
"""48 bits of a hash, in parts that fp32 sums exactly, squares too, over 4096 ranks."""


def agreement(*what: object) -> Tensor:
    """Numbers to be summed over ranks, (16,) fp32; ``what`` is compared by its ``repr``."""
    digest = hashlib.sha256(repr(what).encode()).digest()[:_PARTS]
    parts = torch.tensor([byte & _LARGEST for byte in digest], dtype=torch.float32)
    return torch.cat((parts, parts * parts))


def ranks_agree(total: Tensor, ranks: int) -> Tensor:
    """Whether all ranks gave the same, (), on the device of ``total``, which is the sum of their :func:`agreement`.

    By Cauchy and Schwarz ``ranks · Σ h² >= (Σ h)²``, with equality where all h are equal.
    """
    sums, squares = total.double().chunk(2)
    return (sums * sums == ranks * squares).all()


def refuse_disagreement(sums: Sequence[Tensor], *what: object) -> None:
    """An all-reduce of its own, over the default group, for who sends ``sums`` by others' code.

    Raises:
        StateError: on all ranks, where some have something else; on a GPU, where nobody waits to learn of it, the sums
            become NaN there.
    """
    total = agreement(*what).to(sums[0].device)
    dist.all_reduce(total)
    disagree = ~ranks_agree(total, dist.get_world_size())
    if disagree.device.type != "cpu":
        for x in sums:
            x.masked_fill_(disagree.to(x.device), torch.nan)
    elif disagree:
        raise StateError(DISAGREEMENT)
