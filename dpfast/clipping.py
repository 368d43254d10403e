"""Clip factors: how much of each sample's gradient may enter the sum, and what that makes the sum's sensitivity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpfast.errors import InputError

_ROUNDED_DOWN = 1.0 - 2.0**-22
"""Covers the roundings of a factor (to fp32, and times N), so that they never let a sample grow beyond C."""


class NormClipper:
    """Base class of norm clippers: from the norms of a batch to clip factors."""

    def clip_factors(self, norms: Tensor) -> Tensor:
        """Factors c (N,) in [0, ∞) with ``c_n · norms_n ≤ sensitivity``.

        Args:
            norms: (N,) fp64, upper bounds of the exact norms; inf or NaN for a sample that must be dropped.
        """
        raise NotImplementedError

    @property
    def sensitivity(self) -> float:
        """The most that adding or removing one sample can move the clipped sum, in L2 norm."""
        raise NotImplementedError


class ConstantFlatClipper(NormClipper):
    """``c_n = min(1, C / norm_n)`` with one norm over all parameters (Abadi et al. 2016, Algorithm 1).

    Args:
        max_norm: C, positive and finite.

    Raises:
        InputError: C is not a positive finite number.

    >>> ConstantFlatClipper(1.0).clip_factors(torch.tensor([0.5, 4.0, torch.inf]).double()).round(decimals=3).tolist()
    [1.0, 0.25, 0.0]
    """

    def __init__(self, max_norm: float):
        self.max_norm = check_max_norm(max_norm)

    @property
    def sensitivity(self) -> float:
        return self.max_norm

    def clip_factors(self, norms: Tensor) -> Tensor:
        factors = torch.where(norms <= self.max_norm, 1.0, self.max_norm * _ROUNDED_DOWN / norms)
        return torch.where(torch.isfinite(norms), factors, 0.0)


def check_max_norm(max_norm: float) -> float:
    """``max_norm`` as a float; raises InputError where it is not positive and finite."""
    value = float(max_norm)
    if not (math.isfinite(value) and value > 0.0):
        raise InputError(f"max_grad_norm={max_norm} must be a positive finite number")
    return value
