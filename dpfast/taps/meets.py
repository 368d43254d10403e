"""Where what has no samples meets some, in earnest: an operation gets a tap's parameters, or what its module gave
without samples, and samples; or rows that the data has picked out of theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfast.errors import DpfastError, InputError, UnsupportedModuleError
from dpfast.taps.gathered import RoutedLayer, gave_rows, rows_among, with_picked
from dpfast.taps.layout import NO_SAMPLES, Mixed, Rows
from dpfast.taps.meeting import Meeting
from dpfast.taps.outputs import failing_in_backward
from dpfast.taps.picked import Picked
from dpfast.taps.registry import find_function
from dpfast.taps.row_by_row import is_pointwise
from dpfast.taps.shared import Operation

PICKED = "picked"
"""What a key begins with, before a way: there it has met rows that the data has picked."""

_NOT_FOLLOWED = (
    "rows that the data picks: {} of them and of parameters alone is not followed, so whose they are is not known. Let "
    "a module with these parameters get them (nn.Linear, nn.Embedding), x[rows] as they are picked"
)


class Meets(RoutedLayer):
    """What a tap does where what it has without samples goes into an operation."""

    def follow(self, operation: Operation) -> Any:
        """The result of an operation on tensors without samples, of which the first is this tap's."""
        place = self.known(operation.way)
        if place == NO_SAMPLES and not operation.meets_others():
            return operation.remains()
        if not torch.is_grad_enabled():
            return operation.plain()
        if isinstance(place, str):
            wrong = UnsupportedModuleError if isinstance(place, Mixed) else InputError
            return self._refused(operation, wrong, f"samples: {place}; freeze it, or put them back before")
        n, substitute = self.taps.batch_size(), find_function(operation.func)
        rows = None if n is None else rows_among(operation.others)
        if rows is not None and are_met_as_rows(operation, *rows):
            return met_as_rows(operation, rows[0])
        if n is not None and (self.known((PICKED, operation.way)) == 0 if rows is None else not _are_all(rows[0], n)):
            return self._refused(operation, UnsupportedModuleError, _NOT_FOLLOWED.format(operation.name))
        if isinstance(place, Rows) and place.together is None and n:
            return operation.plain()  # whose its rows are is not known
        if not isinstance(place, (int, Rows)) or n is None or substitute is None:
            return operation.plain()
        return substitute(Meeting(operation, place, n, substitute.__name__), *operation.args, **operation.kwargs)

    def _refused(self, operation: Operation, error: type[DpfastError], why: str) -> Any:
        what = f"{self.layer}: what {operation.name} makes of its parameters, or of what it gave, and of"
        return failing_in_backward(operation.plain(), error(f"{what} {why}"))


def are_met_as_rows(operation: Operation, picked: Picked, x: Tensor) -> bool:
    """Whether the operation gives a row for each of these, which ``x`` has, in the first dimension."""
    if operation.func is torch.einsum:
        equation, *operands = operation.args
        terms, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
        own = [term for term, y in zip(terms.split(","), operands, strict=False) if y is x]
        return bool(own and own[0][:1].isalpha() and own[0][:1] == result[:1])
    if is_pointwise(operation.name):
        tensors = [*operation.others, *(y.value for y in operation.shared)]
        return find_function(operation.func) is not None and x.dim() == max(y.dim() for y in tensors)
    return operation.name in _ROW_BY_ROW and bool(operation.args) and operation.args[0] is x


_ROW_BY_ROW = frozenset(("linear", "matmul", "__matmul__", "mm", "layer_norm", "rms_norm"))


def met_as_rows(operation: Operation, picked: Picked) -> Any:
    """The operation's result, each row of which has a gradient of its own."""
    substitute = find_function(operation.func)
    assert substitute is not None
    try:
        picked.check()
    except UnsupportedModuleError as error:
        raise UnsupportedModuleError(f"{operation.shared[0].tap.layer}: in {operation.name}, {error}") from None
    assert picked.numbers is not None
    meeting = Meeting(operation, 0, len(picked.numbers), substitute.__name__)
    with with_picked(picked):
        output = substitute(meeting, *operation.args, **operation.kwargs)
    if output.shape[:1] != picked.numbers.shape[:1]:
        raise UnsupportedModuleError(
            f"{meeting.tap.layer}: {operation.name} makes {tuple(output.shape)} of {tuple(picked.numbers.shape)} rows "
            "that the data picks, and what has no samples; give each row its own"
        )
    gave_rows(output, picked)
    return output


def _are_all(picked: Picked, n: int) -> bool:
    """Whether they are one row of each of n samples, or all of it, in the samples' order."""
    if picked.of is None or picked.numbers is None or picked.numbers.shape[:1] != (n,):
        return False
    try:
        whose = picked.of.samples(n)[picked.numbers.cpu()].reshape(n, -1)
    except UnsupportedModuleError:  # it is not known
        return False
    return bool((whose == torch.arange(n).unsqueeze(1)).all())
