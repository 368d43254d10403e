"""Losses that compare samples with each other have no gradients by sample."""

from __future__ import annotations

from torch import Tensor

from dpfast.errors import UnsupportedModuleError


def refuse_mixed(number: int, shape: tuple[int, ...], why: str, grad: Tensor) -> None:
    """A hook on an output of the model: a gradient came to it.

    Args:
        number: of the output, whose tensors are counted as they stand in tuples and dicts.
        why: what is wrong with it.
    """
    raise UnsupportedModuleError(
        f"the loss was made from output {number} of the model, {shape}, and {why} (as forward passes with one sample "
        "exchanged tell: similarities of all pairs, in-batch negatives), so its gradient is no sum of samples' own, "
        "and clipping bounds nothing; make each sample's loss from that sample alone"
    )
