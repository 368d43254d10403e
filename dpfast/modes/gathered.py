"""What a step knows of one parameter, and what becomes of its clipped sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm, towards_zero
from dpfast.factors import Dense, Factor


class Gathered:
    """What a step knows of one parameter."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []
        self.norm: Any = None  # a SquaredNorm, once it has been taken
        self.closed = False  # whether the norm has been taken, or waits to be, for good
        self.total: Any = None  # a Tensor, once it is clipped

    def receive(self, result: Dense | SquaredNorm) -> None:
        """What became of a factor that waited."""
        if isinstance(result, Dense):
            self.factors.append(result)
        else:
            self.norm = result

    def add(self, total: Tensor) -> None:
        """The clipped sum of one use more."""
        self.total = total if self.total is None else self.total + total

    def clip(self, factor: Factor, coefficients: Tensor) -> None:
        """Takes the clipped sum; what the factor keeps is freed with it."""
        self.total = factor.weighted_sum(coefficients.to(self.norm.upper.device))


def clipped_total(entry: Gathered | None, coefficients: Tensor) -> Tensor | None:
    """The clipped sum; what its factor keeps is freed as soon as it has been taken."""
    if entry is not None and entry.total is None:
        entry.clip(entry.factors.pop(), coefficients)
    return None if entry is None else entry.total


def added(before: Tensor | None, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Their sum, rounded once: to fp16 towards zero, because gradients below its normal numbers are common and there
    nothing bounds what rounding to nearest adds; otherwise to nearest. Written into ``before`` where it can be."""
    if dtype is torch.float16:
        return towards_zero(total if before is None else total + before, dtype)
    if before is None:
        return total.to(dtype)
    before += total
    return before


def rounding(parameter: nn.Parameter) -> float:
    """By how much, relatively, :func:`added` may make a clipped sum larger, where that counts: in bf16."""
    return torch.finfo(torch.bfloat16).eps / 2 if parameter.dtype is torch.bfloat16 else 0.0
