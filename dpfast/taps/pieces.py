"""What a forward that runs in place of a layer's own makes its steps with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dpfast.factors import Factor
from dpfast.taps.activations import Activations
from dpfast.taps.others import looked_at
from dpfast.taps.shared import Owner
from dpfast.taps.uses import added, told_apart

_trained: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # of a tensor, without a line of Python


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
        values, trainable, numbers = [], [], []
        for p in parameters:
            values.append(None if p is None else p.detach())
            if p is not None and p.requires_grad and id(p) not in numbers:
                trainable.append(p)
                numbers.append(id(p))
        output = function(*inputs, *values)
        if not trainable:
            return output

        def of_piece(module: nn.Module, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
            uses = told_apart(parameters)
            answer = looked_at(rule, type(module).__name__, rule(uses, activations, backprops))
            if list(map(id, answer)) == numbers and all(map(_trained, trainable)):  # nearly always
                return answer
            found = added(parameters, uses, answer)
            return {p: factor for p, factor in found.items() if p is not None and p.requires_grad}

        of_piece.__name__ = rule.__name__
        return self._tap.tapped(output, (inputs, {}), trainable, fresh=fresh, rule=of_piece, as_is=True)
