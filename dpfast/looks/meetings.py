"""What has no samples, in the copy of a model that is looked at: it goes the way that it goes in earnest, so that it is
seen in which order it meets the samples. A parameter has no rows of its own that would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps import (
    ALONE,
    ELSEWHERE,
    NO_SAMPLES,
    OWN,
    Operation,
    Picked,
    Place,
    Rows,
    Shared,
    are_met_as_rows,
    detached_parameters,
    find_rule,
    gave_rows,
    in_backward,
    owned_modules,
    picked_here,
    rows_among,
)
from dpfast.trials import OfCopy


class AtMeetings(OfCopy):
    """The tap of a copy that has parameters stand in as what has no samples.

    Attributes:
        number: of the tap. ways: the places of all taps and ways, as shapes tell them; empty: nothing stands in.
    """

    number: int
    ways: Mapping[Any, Place]

    def go_the_ways(self, ways: Mapping[Any, Place]) -> None:
        """Parameters stand in from here on."""
        self.ways = ways
        own = {key[0] for number, key in ways if number == self.number and isinstance(key, tuple)}
        self.alone = self.alone or ALONE in own
        if ELSEWHERE in own or OWN in own:
            self.stand_in_elsewhere()

    def known(self, key: Any) -> Place:
        return self.ways.get((self.number, key)) if self.ways else super().known(key)

    def gave(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's forward gives."""
        if not self.ways or find_rule(self.module) is not None or self.known((OWN,)) != 0 or picked_here() is not None:
            return forward(*args, **kwargs)
        owned = owned_modules(self.module)
        with detached_parameters(owned, partial(self.own, owned)):
            return forward(*args, **kwargs)

    def own(self, owned: Sequence[nn.Module], parameter: nn.Parameter) -> Tensor:
        return self._stand_in(OWN, owned, parameter) if parameter.requires_grad else parameter

    def elsewhere(self, parameter: nn.Parameter) -> Tensor:
        if not (self.ways and parameter.requires_grad and torch.is_grad_enabled()) or in_backward() is not None:
            return parameter
        return self._stand_in(ELSEWHERE, owned_modules(self.module), parameter)

    def _value(self, parameter: nn.Parameter, name: str) -> Tensor:
        return parameter  # that of the copy

    def without_samples(self, output: Any) -> Any:
        """The output of a layer, which has no samples where that is known of it."""
        if not self.ways or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        if isinstance(output, Shared):
            return Shared.make(self, ("through", output.value.dim()), output.value, ())
        return Shared.make(self, (ALONE, output.dim()), output, ()) if self._is_alone(output.dim()) else output

    def follow(self, operation: Operation) -> Any:
        place = self.known(operation.way)
        if place == NO_SAMPLES:
            return operation.remains()
        rows = rows_among(operation.others)
        if rows is not None and are_met_as_rows(operation, *rows):
            with torch._C.DisableTorchFunction():
                output = self.met_rows(operation, rows[0])
            gave_rows(output, rows[0])
            return output
        output = operation.plain()
        if not isinstance(place, (int, Rows)) or not isinstance(output, Tensor) or picked_here() is not None:
            return output
        with torch._C.DisableTorchFunction():
            return self.met(operation, place, output)

    def met_rows(self, operation: Operation, picked: Picked) -> Tensor:
        """The result where it meets rows that were picked."""
        raise NotImplementedError

    def met(self, operation: Operation, place: int | Rows, output: Tensor) -> Tensor:
        """It has met samples, which are there."""
        raise NotImplementedError
