"""Norms of gradients h of standardised weights that are taken back to the weights themselves, ``J h``
(``factors/standardised.py``), from those of h; of many layers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.stacked_norms import table


class StandardisedTerms(NamedTuple):
    """Numbers of a layer, or tensors of one."""

    per_norm: Any
    """What M and Q may be off, in L2 norm over channels, is this times ‖h‖, or times what stands in its place,"""

    lost: Any
    """and this times ‖b‖ + 1, of what underflows."""

    moments: Any
    """What a mean and a mean square are off, and what they are times, by the channels' entries."""

    sums: Any
    """The same of M and Q."""

    rounding: Any
    """What applying J rounds, relative to ‖h‖."""

    stretch: Any
    """At most ‖J‖."""


class UnfinishedStandardised(NamedTuple):
    """
    Attributes:
        inner: of h.
        numbers: (5, M) fp64: what J takes from ‖h‖², ‖M‖, ‖Q‖, how far h may be off where ``inner`` does not say it,
            and ‖b‖ where h is not written, else 0.
        of: ‖a‖‖b‖, (M,), where h is not written; None: where it is, and errors go by ‖h‖.
    """

    inner: Any
    numbers: Tensor
    of: Tensor | None
    terms: StandardisedTerms

    @property
    def device(self) -> torch.device:
        return self.numbers.device


def finish_standardised(parts: Sequence[UnfinishedStandardised], inner: SquaredNorm, n: int) -> SquaredNorm:
    """‖J h‖² and its upper bound for all of them, (F, n), from those of h; derived in docs/bounds.md."""
    numbers = torch.cat([p.numbers for p in parts], 1) if len(parts) > 1 else parts[0].numbers
    taken, m, q, off_before, of_rows = numbers.view(5, -1, n).unbind()
    layers = [p.numbers.shape[1] // n for p in parts]
    terms = _columns([p.terms for p in parts], layers, numbers)
    norm = inner.upper.sqrt()
    of = norm
    if any(p.of is not None for p in parts):
        own = norm.split(layers)
        of = torch.cat([x if p.of is None else p.of.view(-1, n) for x, p in zip(own, parts, strict=True)])
    e = torch.addcmul(of * terms.per_norm, of_rows + 1.0, terms.lost)
    both = torch.add(m + q, e, alpha=2.0)
    off = both.square().mul_(terms.moments).addcmul_((both + e).mul_(e), terms.sums)
    upper = (inner.upper - taken).clamp_(min=0.0).add_(off).add_(inner.upper, alpha=2.0**-40).sqrt_()
    upper.addcmul_(norm, terms.rounding).addcmul_(off_before, terms.stretch)
    value = (inner.value - taken).clamp_(min=0.0)
    return SquaredNorm(value, upper.square_().mul_(1.0 + 2.0**-40))


def _columns(terms: Sequence[StandardisedTerms], layers: Sequence[int], like: Tensor) -> StandardisedTerms:
    """(F, 1) each, fp64."""
    if not any(isinstance(x, Tensor) for numbers in terms for x in numbers):
        return StandardisedTerms(*table(terms, layers, like).unbind())
    times = torch.tensor(layers, device=like.device)
    columns = (
        torch.stack([torch.as_tensor(x, dtype=torch.float64, device=like.device) for x in of]).repeat_interleave(times)
        for of in zip(*terms, strict=True)
    )
    return StandardisedTerms(*(x.unsqueeze(-1) for x in columns))
