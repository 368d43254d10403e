"""How a look calls copies of a model: with the inputs taken apart, of which other samples are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpfast.taps.bags import NO_BAGS, Bags
from dpfast.taps.inputs import Structure


class Trial(Structure):
    """Inputs taken apart, of which one dimension or none has the samples.

    Attributes:
        leaves: plain tensors, and what stands among them. Bags in one row are by sample.
        with_gradients: forward passes are recorded by autograd, as in training, where the forward asks for gradients
            itself (``torch.autograd.grad``). Else they are only where gradients are looked at, which takes less memory.
    """

    def __init__(self, inputs: Any, bags: Bags = NO_BAGS, *, with_gradients: bool = False):
        super().__init__(inputs)
        self.bags, self.with_gradients = bags, with_gradients
        self.leaves = bags.by_sample([x.as_subclass(Tensor) if isinstance(x, Tensor) else x for x in self.leaves])

    def as_called(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves as the model takes them, each at its place."""
        return self.bags.as_called(leaves)
