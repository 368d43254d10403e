"""Norms by Gram matrices of many factors, what is left to do with N numbers done for all together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.stacked_norms import table


class UnfinishedGram(NamedTuple):
    """What the norms of M gradients follow from.

    Attributes:
        totals: (9, M) fp64: the computed ``Σ_tt' A_tt' B_tt'``, the three sums of its bound (``bounds.gram``), and the
            sums over positions of ‖a_t‖, ‖b_t‖, ‖a_t‖‖b_t‖, ‖a_t‖² and ‖b_t‖², of norms upper bounds.
        terms: of the bound, ``bounds.gram_terms``.
    """

    totals: Tensor
    terms: tuple[float, ...]

    @property
    def device(self) -> torch.device:
        return self.totals.device


def finish_grams(parts: Sequence[UnfinishedGram], n: int) -> SquaredNorm:
    """‖G‖² and its upper bound for all of them, (F, n) with n > 0, as ``stacked_norms.finish_norms``."""
    totals = torch.cat([p.totals for p in parts], 1) if len(parts) > 1 else parts[0].totals
    return finish_totals(totals.view(9, -1, n), [p.terms for p in parts], [p.totals.shape[1] // n for p in parts])


def finish_totals(totals: Tensor, terms: Sequence[tuple[float, ...]], layers: Sequence[int]) -> SquaredNorm:
    """The same from the first seven of the totals, (7 or more, F, n), where each part stands for so many layers."""
    *relative, least = table(terms, layers, totals).split(6)
    sum_a, sum_b, products = totals[4:7].square().unbind()
    rows = torch.cat([totals[1:4], torch.stack((products, sum_b, sum_a))]).mul_(relative[0])
    value = totals[0].clamp(min=0.0)  # the exact one is no less
    error = rows.cumsum(0)[-1].add_(least[0])  # the order of sum(0) depends on n
    return SquaredNorm(value, value + error)
