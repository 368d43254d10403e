"""A step whose layers all wait for others alike is finished as the one before, where all is as it was then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpfast.factors import Alike, Numbers, Remembered
from dpfast.modes.accumulation import Left, note_alike

_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]  # of a tensor, without a line of Python

Taken = Sequence[tuple[list[nn.Parameter], Alike]]


class Before:
    """What is known from a step.

    Args:
        places: of all trainable parameters. order: in which its layers came, see ``Deferred.order``.
        remembered: of its factors. taken: whose they are.
    """

    def __init__(
        self, places: Mapping[nn.Parameter, int], n: int, order: object, remembered: Remembered, taken: Taken
    ) -> None:
        self._places, self._n, self._order = places, n, order
        self.remembered = remembered
        of = [iter(parameters) for parameters, _ in taken]
        self._parameters = [next(of[i]) for i in remembered.of]
        used = set(map(id, self._parameters))
        self._unused = [p for p in places if id(p) not in used]

    @classmethod
    def learned(cls, places: Mapping[nn.Parameter, int], n: int, order: object, taken: Taken) -> Before | None:
        """None where the next step would have to be looked at again."""
        if any(p.dtype is not torch.float32 or p.device.type != "cpu" for p in places):
            return None
        of = [[places[p] for p in parameters] for parameters, _ in taken]
        remembered = Remembered.learned([alike for _, alike in taken], n, of)
        return None if remembered is None else cls(places, n, order, remembered, taken)

    def fits(self, places: Mapping[nn.Parameter, int], n: int, order: object) -> bool:
        """Whether a step is of the same parameters, layers, shapes and numbers of samples. Ids tell parameters apart,
        because ``places`` keeps them alive; their dtype may be another by now, which autocast hides."""
        as_then = places is self._places and n == self._n and order == self._order
        return as_then and {*map(_dtype, places)} <= {torch.float32}

    def sums(self, numbers: Sequence[Numbers], coefficients: Tensor) -> list[Tensor] | None:
        """The clipped sums of the parameters that are used, in their order here; None where a sample is dropped, of
        which nothing may be read."""
        return None if 0.0 in coefficients.tolist() else self.remembered.sums(numbers, coefficients)

    def leave(self, sums: Sequence[Tensor], left: Left) -> bool:
        """Leaves them in ``p.grad``, with the note; False, and nothing is done, where there is something already."""
        if [p for p in self._places if p.grad is not None]:
            return False
        zeros = [torch.zeros_like(p) for p in self._unused]
        for p, total in zip((*self._parameters, *self._unused), (*sums, *zeros), strict=True):
            p.grad = total
        note_alike((*sums, *zeros), left)
        return True

    def by_parameter(self, sums: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Whose they are."""
        return dict(zip(self._parameters, sums, strict=True))
