"""What a rule makes of a layer where kernels run, learned from its answer: what stands for each parameter's gradients
until the pass ends, made again without asking.

As ``recipe.py``, of one layer by itself: its launches have enough to do, and what N numbers take at last is done once
for all layers anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dpfast.arithmetic import PairCalls, RowNormCalls, SumError, is_traced, ops
from dpfast.factors.dense import Again, Dense, Factor
from dpfast.factors.outer_product import OuterProduct

_Made = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Factor]
"""(activations, backprops, what gives the latter's row norms) of (N, T, ·), contiguous, to a factor."""


class KernelRecipe:
    """For tensors (N, T, ·) of the shapes and dtypes of those that it was learned from; (N, ·) where T is 1.

    Attributes:
        shapes: of the parameters.
        only_keeps: nothing is computed for it: the factors are what the layer has caught.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], parts: Sequence[_Made], whole: tuple[object, Sequence[int]] | None
    ):
        self.shapes, self._parts, self._whole = list(shapes), parts, whole
        self.only_keeps = whole is None and all(isinstance(part, partial) and part.func is _kept for part in parts)
        self._row_norm: RowNormCalls | None = None  # until they are asked for

    @classmethod
    def learned(cls, factors: Sequence[Factor], a: Tensor, b: Tensor) -> KernelRecipe | None:
        """From what a rule, which looks at no values, has answered for these; None where it has to be asked again."""
        shapes = [factor.shape for factor in factors]
        if is_traced() or not ops.runs_kernels(a, b) or not a.is_floating_point():
            return None
        wholes = [factor.whole for factor in factors if isinstance(factor, Dense) and factor.whole is not None]
        if wholes and len(wholes) == len(factors) and all(make is wholes[0][0] for make, _ in wholes):
            return cls(shapes, (), (wholes[0][0], [place for _, place in wholes]))
        if not (a.dim() == b.dim() == 3 or a.dim() == b.dim() == 2):
            return None
        parts = [_part(factor, a, b) for factor in factors]
        return None if None in parts else cls(shapes, [part for part in parts if part is not None], None)

    def factors(self, a: Tensor, b: Tensor) -> list[Factor] | None:
        """Of the parameters, as they are kept: the same bits as of the rule's answer. None: the rule is to be asked."""
        if self._whole is not None:
            make, places = self._whole
            found = make(a, b)  # type: ignore[operator]  # it makes them
            return None if found is None else [found[place] for place in places]
        if b.dim() == 2:
            a, b = a.unsqueeze(1), b.unsqueeze(1)
        if self._row_norm is None:
            self._row_norm = RowNormCalls(b)  # of any tensors like these
        return [make(a, b, self._row_norm) for make in self._parts]


def _part(factor: Factor, a: Tensor, b: Tensor) -> _Made | None:
    of = id(a), id(b)
    if isinstance(factor, Dense):
        if factor.again is None or factor.of not in (of, (0, id(b))):
            return None
        error = factor.settled()
        if isinstance(error, Tensor):
            return None
        return partial(_made_again, factor.again, None if error is None else error[1:])
    if not isinstance(factor, OuterProduct) or factor.of not in (of, of[::-1]):
        return None
    x, y = factor.activations, factor.backprops
    if ops.groups(x, y):  # they wait for others of their shape
        return None
    return partial(_written if factor.keeps else _kept, factor.of != of, PairCalls(x, y))


def _made_again(
    again: Again,
    known: tuple[tuple[float, ...], float, float] | None,
    a: Tensor,
    b: Tensor,
    row_norm: Callable[[Tensor], Tensor],
) -> Dense:
    """``known``: numbers of its ``SumError``, without the norms."""
    if known is None:
        return Dense(again(a, b, b)[0])
    values, norms = again(a, b, row_norm(b))
    return Dense(values, SumError(norms, *known))


def _written(swapped: bool, calls: PairCalls, a: Tensor, b: Tensor, row_norm: object) -> Dense:
    norm, values = calls.kept(b, a) if swapped else calls.kept(a, b)
    found = Dense(values, norm.error, norm)
    found.calls = calls
    return found


def _kept(swapped: bool, calls: PairCalls, a: Tensor, b: Tensor, row_norm: object) -> OuterProduct:
    return OuterProduct.of_rows(b, a, calls) if swapped else OuterProduct.of_rows(a, b, calls)
