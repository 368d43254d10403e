"""What a forward that runs in place of a layer's own makes its steps with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpfast.factors import Factor
from dpfast.taps.activations import Activations
from dpfast.taps.others import looked_at
from dpfast.taps.own_node import OwnStep
from dpfast.taps.registry import find_forward
from dpfast.taps.shared import Owner, Shared
from dpfast.taps.uses import added, told_apart

_trained: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # of a tensor, without a line of Python


def forward_in_pieces(module: nn.Module, inputs: Any) -> Callable[..., Any] | None:
    """The forward that runs in place of the module's own on these inputs. On what has no samples, a prompt that the
    model learns, its own runs, and its operations are followed; but a recurrent layer of torch's keeps its weights in a
    list, past what stands in for them."""
    substitute = find_forward(module)
    if substitute is None or not any(isinstance(x, Shared) for x in tree_leaves(inputs)):
        return substitute
    trained = any(map(_trained, module.parameters()))
    return substitute if trained and isinstance(module, nn.RNNBase) else None


class Runs(Owner, Protocol):
    """Of whose forward they are the steps: a tap."""

    def tapped_as_one(
        self, step: OwnStep, values: Sequence[Tensor], x: Tensor, parameters: Sequence[nn.Parameter], rule: Any
    ) -> Tensor | None:
        """The step's output; None where it is to be made by others."""


class Pieces:
    """What a forward of ``registry.register_forward`` makes its steps with."""

    def __init__(self, tap: Runs):
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
        trainable = _trainable(parameters)
        if not trainable:
            return output
        of_piece = _of_piece(rule, parameters, trainable)
        return self._tap.tapped(output, (inputs, {}), trainable, fresh=fresh, rule=of_piece, as_is=True)

    def as_one(
        self,
        rule: Callable[..., Mapping[nn.Parameter, Factor]],
        step: OwnStep,
        parameters: Sequence[nn.Parameter],
        x: Tensor,
    ) -> Tensor | None:
        """The output of ``step`` on x and the parameters, in one node with its tap; None, and nothing has run, where
        steps of several are to be taken.

        Args:
            rule: as above; it gets no activations, and the backprops that the step's backward pass gives.
        """
        trainable = _trainable(parameters)
        if not trainable:
            return None
        values = [p.detach() for p in parameters]
        return self._tap.tapped_as_one(step, values, x, trainable, _of_piece(rule, parameters, trainable))


def _trainable(parameters: Sequence[nn.Parameter | None]) -> list[nn.Parameter]:
    """Each once."""
    return list({id(p): p for p in parameters if p is not None and p.requires_grad}.values())


def _of_piece(
    rule: Callable[..., Mapping[nn.Parameter, Factor]],
    parameters: Sequence[nn.Parameter | None],
    trainable: Sequence[nn.Parameter],
) -> Callable[..., Mapping[nn.Parameter, Factor]]:
    """The rule, as a tap asks it."""
    numbers = list(map(id, trainable))

    def of_piece(module: nn.Module, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
        uses = told_apart(parameters)
        answer = looked_at(rule, type(module).__name__, rule(uses, activations, backprops))
        if list(map(id, answer)) == numbers and all(map(_trained, trainable)):  # nearly always
            return answer
        found = added(parameters, uses, answer)
        return {p: factor for p, factor in found.items() if p is not None and p.requires_grad}

    of_piece.__name__ = rule.__name__
    of_piece.is_of_piece = True  # type: ignore[attr-defined]  # a function's own
    return of_piece


def is_of_piece(rule: Any) -> bool:
    """Whether it is a piece's, and not that of an operation in which parameters meet samples."""
    return getattr(rule, "is_of_piece", False)
