"""The norms of many small factors of one shape, taken in one go."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from dpfast.arithmetic import SquaredNorm
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.outer_product import OuterProduct

STACKED_BYTES = {"cpu": 2**16, "cuda": 2**20}
"""Factors of tensors of at most so many bytes are stacked for their norms: on a CPU more would not stay in the caches,
and new memory costs page faults; a GPU copies so many in less than a launch takes."""


STACKED_FACTORS = 64
"""The most that are stacked at once, which bounds the copies' memory."""


def sq_norms(factors: Sequence[Factor]) -> list[SquaredNorm]:
    """Every factor's ``sq_norm()``, the same bits; small ones of one shape (biases, small layers) in one go.

    A sample's numbers do not depend on the batch that it stands in, so several factors may stand in one.
    """
    norms: dict[int, SquaredNorm] = {}
    alike: dict[Hashable, list[int]] = {}
    for i, factor in enumerate(factors):
        alike.setdefault(_likeness(factor) or i, []).append(i)
    groups = [
        all_of[k : k + STACKED_FACTORS] for all_of in alike.values() for k in range(0, len(all_of), STACKED_FACTORS)
    ]
    for members in groups:
        if len(members) == 1:
            norms[members[0]] = factors[members[0]].sq_norm()
            continue
        together = _stacked([factors[i] for i in members]).sq_norm()
        parts = zip(*(x.unflatten(0, (len(members), -1)) for x in together), strict=True)
        norms.update(zip(members, map(SquaredNorm._make, parts), strict=True))
    return [norms[i] for i in range(len(factors))]


def _likeness(factor: Factor) -> Hashable:
    """What factors that are stacked have in common; None for one that is not."""
    terms: Hashable = None
    if isinstance(factor, Dense):
        found = factor.likeness()
        if found is None:
            return None
        tensors, terms = found
    elif isinstance(factor, OuterProduct):
        tensors = [factor.activations, factor.backprops]
    else:
        return None
    most = STACKED_BYTES.get(tensors[0].device.type, 0)
    if factor.num_samples == 0 or any(x.nbytes > most or not x.is_contiguous() for x in tensors):
        return None
    return (type(factor), terms, *((x.shape, x.dtype, x.device) for x in tensors))


def _stacked(factors: Sequence[Any]) -> Factor:
    """One factor with the samples of all."""

    if isinstance(factors[0], Dense):
        return Dense.stacked(factors)
    return OuterProduct(*(torch.cat([getattr(f, name) for f in factors]) for name in ("activations", "backprops")))
