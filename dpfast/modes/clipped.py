"""From the norms of one backward pass to what its sums are weighted with: the (N,)-long end of every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, bounds, towards_zero
from dpfast.modes.clippers import (
    ConstantFlatClipper,
    NormClipper,
    clip_factors,
    constant_factors,
    thresholds_taken,
)


class Clipped(NamedTuple):
    """What becomes of the norms of P parameters; (N,) of all together, (P, N) where each is clipped by itself.

    Attributes:
        norms: over all parameters, the value (N,) fp64. upper: its proven upper bound.
        factors: c, fp32.
        weights: c times ``scale``, fp64. single: the same rounded towards zero, fp32.
        measured: what the factors were taken from, (1 or P, N) fp64.
    """

    norms: Tensor
    upper: Tensor
    factors: Tensor
    weights: Tensor
    single: Tensor
    measured: Tensor

    def coefficients(self, number: int, dtype: torch.dtype) -> Tensor:
        """(N,), of the parameter of that number and dtype."""
        weights = self.weights if dtype is torch.float64 else self.single
        return weights if weights.dim() == 1 else weights[number]


def clip(
    clipper: NormClipper,
    norms: Sequence[SquaredNorm | None],
    *,
    scale: float | Tensor,
    rounding: Sequence[float],
    valid: Tensor | None = None,
) -> Clipped:
    """The clipper's factors for one norm over all parameters, or one each.

    Args:
        norms: of each parameter's gradients, (N,); None where the step has not used it.
        scale: what the gradients are to be multiplied with, a number or one for each, (N,) fp64.
        rounding: by how much, relatively, each parameter's sum may come out too large.
        valid: (N,) bool; a sample that is not has no gradient: its norms are 0, whatever was computed, and its
            factors too.
    """
    found = [n for n in norms if n is not None]
    device = found[0].value.device if found else torch.device("cpu") if valid is None else valid.device
    if valid is not None:
        valid = valid.to(device)
    excess = max(rounding, default=0.0)
    if type(clipper) is ConstantFlatClipper and len(found) == 1:
        return clip_to(thresholds_taken(clipper)[0], found[0], scale, excess=excess, valid=valid)

    def total(squares: Sequence[Tensor], slop: float) -> Tensor:
        if not squares:
            return torch.zeros(0 if valid is None else len(valid), dtype=torch.float64, device=device)
        stacked = [x.to(device) for x in squares]
        summed = torch.stack(stacked).cumsum(0)[-1] if len(stacked) > 1 else stacked[0]  # sum(0)'s order depends on N
        return _valid(summed, valid) * (scale**2 * slop)

    value = total([n.value for n in found], 1.0)
    upper = total([n.upper for n in found], bounds.fp64_slop(len(found), 8))
    if clipper.is_per_layer:
        unused = torch.zeros_like(upper)
        measured = [
            unused if n is None else _valid(n.upper.to(device), valid).sqrt() * (scale * (1.0 + own))
            for n, own in zip(norms, rounding, strict=True)
        ]
    else:
        measured = [upper.sqrt() * (1.0 + excess)]
    factors = [_valid(f, valid) for f in clip_factors(clipper, measured)]
    if not clipper.is_per_layer:
        together = factors[0]
    else:
        together = torch.stack(factors) if factors else upper.new_zeros(0, len(upper))
    weights = together * scale
    rounded, single = towards_zero(torch.stack([together, weights]), torch.float32).unbind()
    return Clipped(
        value,
        upper,
        rounded,
        weights,
        single.clone(),  # as in clip_to
        torch.stack(measured) if measured else upper.new_zeros(0, len(upper)),
    )


def clip_to(
    limit: float | Tensor,
    norm: SquaredNorm,
    scale: float | Tensor,
    *,
    added: int = 1,
    excess: float = 0.0,
    valid: Tensor | None = None,
) -> Clipped:
    """:func:`clip` by a ``ConstantFlatClipper`` of this limit, the same bits.

    Args:
        limit: in a graph, which is given it, a tensor () fp64.
        norm: of so many parameters, whose squares were ``added`` one after another.
        excess: by how much, relatively, a parameter's sum may come out too large.
    """
    value, upper = _valid(norm.value, valid), _valid(norm.upper, valid)
    as_they_are = isinstance(scale, float) and scale == 1.0
    upper = upper * (scale**2 * bounds.fp64_slop(added, 8))
    measured = upper.sqrt()
    if excess:
        measured = measured * (1.0 + excess)
    factors = _valid(constant_factors(limit, measured), valid)
    if as_they_are:
        single = towards_zero(factors, torch.float32)
        return Clipped(value, upper, single, factors, single, measured.unsqueeze(0))
    weights = factors * scale
    rounded, single = towards_zero(torch.stack([factors, weights]), torch.float32).unbind()
    single = single.clone()  # launches read it, which are others where an address is no multiple of 16 bytes
    return Clipped(value * scale**2, upper, rounded, weights, single, measured.unsqueeze(0))


def _valid(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else torch.where(valid, x, 0.0)
