"""Factors in a captured graph: what their norms are taken of is what is summed."""

from __future__ import annotations

from torch import Tensor

from dpfast.arithmetic import pinned


def pin(factor: object) -> None:
    """Makes every tensor that the factor, or one that it is made of, holds one in memory, see ``arithmetic.pinned``."""
    for name, value in list(vars(factor).items()):
        if isinstance(value, Tensor):
            setattr(factor, name, pinned(value))
        elif type(value) is list:
            for i, x in enumerate(value):
                if isinstance(x, Tensor):
                    value[i] = pinned(x)
                elif hasattr(x, "sq_norm"):
                    pin(x)
        elif hasattr(value, "sq_norm"):
            pin(value)
