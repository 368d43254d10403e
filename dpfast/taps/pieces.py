"""What a forward that runs in place of a layer's own makes its steps with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from dpfast.factors import Factor
from dpfast.taps.others import looked_at
from dpfast.taps.registry import Activations
from dpfast.taps.shared import Owner
from dpfast.taps.uses import added, told_apart


class Pieces:
    """What a forward of ``registry.register_forward`` makes its steps with."""

    def __init__(self, tap: Owner):
        self._tap = tap

    def __call__(
        self,
        rule: Callable[..., Mapping[nn.Parameter, Factor]],
        function: Callable[..., Any],
        parameters: Sequence[nn.Parameter | None],
        *inputs: Any,
        fresh: bool = True,
    ) -> Any:
        """``function(*inputs, *parameters)``, tapped.

        Args:
            rule: ``rule(parameters, activations, backprops)``, a rule that takes the parameters and finds the
                tensors laid out as ``function`` has them; what it says of frozen parameters is left out. A parameter
                that is there twice comes as two tensors.
            fresh: the function makes its output afresh and keeps no reference to it.
        """
        output = function(*inputs, *(None if p is None else p.detach() for p in parameters))
        trainable = list(dict.fromkeys(p for p in parameters if p is not None and p.requires_grad))
        if not trainable:
            return output

        def of_piece(module: nn.Module, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
            uses = told_apart(parameters)
            answer = looked_at(rule, type(module).__name__, rule(uses, activations, backprops))
            found = added(parameters, uses, answer)
            return {p: factor for p, factor in found.items() if p is not None and p.requires_grad}

        of_piece.__name__ = rule.__name__
        return self._tap.tapped(output, (inputs, {}), trainable, fresh=fresh, rule=of_piece, as_is=True)
