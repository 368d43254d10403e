"""How a look calls copies of a model: with the inputs taken apart, of which other samples are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from dpfast.taps import NO_BAGS, Bags, Structure
from dpfast.trials.entries import Entries, Path, given_whole, put_in


class Trial(Structure):
    """Inputs taken apart, of which one dimension or none has the samples.

    Attributes:
        leaves: plain tensors, and what stands among them; behind these the entries. Bags in one row are by sample.
        entries: what has one for each sample, by where it is.
        with_gradients: forward passes are recorded by autograd, as in training, where the forward asks for gradients
            itself (``torch.autograd.grad``). Else those on numbers are only where gradients are looked at, or what is
            made without samples, which takes less memory.
        passes: so many come before the one that is looked at, in the same copy.
    """

    def __init__(
        self,
        inputs: Any,
        bags: Bags = NO_BAGS,
        entries: Mapping[Path, Entries | None] = MappingProxyType({}),
        *,
        with_gradients: bool = False,
        passes: int = 0,
    ):
        super().__init__(inputs, whole=given_whole(entries))
        self.entries = {path: x for path, x in entries.items() if x is not None}
        self.bags, self.with_gradients, self.passes = bags, with_gradients, passes
        self.leaves = bags.by_sample([x.as_subclass(Tensor) if isinstance(x, Tensor) else x for x in self.leaves])
        self.leaves += self.entries.values()

    def all_leaves(self) -> list[Any]:
        """In entries too."""
        own = self.leaves[: len(self.leaves) - len(self.entries)]
        return own + [x for some in self.entries.values() for x in some.leaves()]

    def as_called(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves as the model takes them, each at its place."""
        return self.bags.as_called(leaves)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The inputs with these leaves and entries."""
        own = len(leaves) - len(self.entries)
        inputs = super().unflatten(leaves[:own])
        for path, x in zip(self.entries, leaves[own:], strict=True):
            inputs = put_in(inputs, path, x.as_given())
        return inputs

    def run_passes(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Those that come before, of a copy whose taps do nothing yet.

        Args:
            leaves: as the model takes them.
        """
        for _ in range(self.passes):
            args, kwargs = self.unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves])
            model(*args, **kwargs)
