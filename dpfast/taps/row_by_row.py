"""Functions that make each row of what they give of that row alone: entry by entry, or along the last dimension."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NOT_TAGGED = frozenset(
    ("multiply", "subtract", "divide", "truediv", "floordiv", "floor_divide", "negative", "absolute", "expit")
) | frozenset(("hardswish", "log_sigmoid", "softsign", "tanhshrink", "dropout"))
"""Of torch's functions that go entry by entry those that it does not say so of, as it makes them of others."""

_ALONG = frozenset(
    ("softmax", "log_softmax", "softmin", "normalize", "glu", "logsumexp", "sum", "mean", "amax", "amin")
)
_NORMS = frozenset(("layer_norm", "rms_norm"))
_CAT = frozenset(("cat", "concat", "concatenate"))


def made_row_by_row(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], bool]:
    """What a function makes a result of whose rows are each made of the rows at its place; nothing where it is not
    known to be such a one. And whether each of these has rows, and none is broadcast over those of others."""
    of_torch, *within = (getattr(func, "__module__", None) or "torch").split(".")
    if of_torch != "torch" or within[:1] == ["_ops"]:  # somebody's own, whatever its name is
        return (), False
    name = getattr(func, "__name__", "")
    if is_pointwise(name):
        return (*args, *kwargs.values()), False
    if name in _CAT:
        tensors = args[0] if args else kwargs.get("tensors", ())
        ranks = {x.dim() for x in tensors}
        return (tensors, True) if len(ranks) == 1 and _dim(args, kwargs) in (-1, ranks.pop() - 1) else ((), False)
    x = args[0] if args else None
    if not isinstance(x, Tensor):
        return (), False
    if name in _NORMS:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return ((x,), False) if isinstance(shape, Sequence) and len(shape) == 1 else ((), False)
    along = name in _ALONG and _dim(args, kwargs) in (-1, x.dim() - 1)
    return ((x,), False) if along else ((), False)


def _dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return dim if type(dim) is int else None


@functools.lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether torch says so of its function of that name, in place and as an operator too (``__rsub__``, ``mul_``)."""
    plain = name.strip("_").removeprefix("special_")
    names = {plain, plain[1:]} if name.startswith(("__r", "__i")) else {plain}
    return any(x in _NOT_TAGGED or _is_tagged(x) for x in names)


def _is_tagged(name: str) -> bool:
    operators = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = [] if operators is None else [getattr(operators, x) for x in operators.overloads()]
    return any(torch.Tag.pointwise in x.tags for x in overloads)
