"""Functions that make each row of what they give of that row alone: entry by entry, or along the last dimension."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_flatten, tree_unflatten

_ALIASES = ("multiply", "subtract", "divide", "truediv", "floordiv", "floor_divide", "negative", "absolute", "expit")
_NOT_TAGGED = frozenset((*_ALIASES, "hardswish", "log_sigmoid", "softsign", "tanhshrink", "dropout"))
"""Those of torch's functions that go entry by entry of which it does not say so."""

_ARITHMETIC = frozenset(form for x in ("add", "sub", "mul", "div", "truediv") for form in (x, f"r{x}", f"i{x}"))
"""In which rows of several tensors are taken to stand alike."""

_ALONG = frozenset(
    ("softmax", "log_softmax", "softmin", "logsumexp", "normalize", "glu", "sum", "mean", "amax", "amin")
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
        some = (*args, *(x for key, x in kwargs.items() if key != "out"))
        several = [x for x in some if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1]
        if len(several) < 2 or name.strip("_") in _ARITHMETIC:
            return some, False
        # All must be known: where rows that stand otherwise change places with these, and back, no samples meet that
        # an exchange would show.
        return several, True
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


def at_places(func: Any, numbers: Tensor, rows: int) -> Any:
    """Such a function that takes each row that was picked to its place among all and back: kernels take the last
    entries another way than those before, so a row's bits would depend on how many others were picked.

    Args:
        numbers: of the rows. rows: how many there are to pick.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if has_torch_function(tensors):  # modes are to see one function, which picks nothing
            return handle_torch_function(run, tensors, *args, **kwargs)
        places = _Places(numbers, rows)
        if not all(map(places.fit, tensors)):
            return func(*args, **kwargs)
        every = [places.take(x) if isinstance(x, Tensor) else x for x in leaves]
        versions = [x._version for x in every if isinstance(x, Tensor)]
        args_of_all, kwargs_of_all = tree_unflatten(every, structure)
        result = func(*args_of_all, **kwargs_of_all)
        written = versions != [x._version for x in every if isinstance(x, Tensor)]
        if written or not isinstance(result, Tensor) or result.shape[:-1] != places.shape:
            return func(*args, **kwargs)
        return places.give(result)

    run.__name__, run.__module__ = getattr(func, "__name__", ""), "torch"
    run.of_rows = getattr(func, "of_rows", func)  # type: ignore[attr-defined]
    return run


class _Places:
    """Of rows among all that there are to pick."""

    def __init__(self, numbers: Tensor, rows: int):
        self.lead, self.numbers = numbers.shape, numbers.flatten()
        self.shape = torch.Size((rows, *(1 for _ in self.lead[1:])))  # of as many dimensions
        self._once = len(self.lead) > 0 and self.numbers.unique().numel() == self.numbers.numel()

    def _has(self, x: Tensor) -> bool:
        return x.dim() == len(self.lead) + 1 and x.shape[:-1] == self.lead

    def fit(self, x: Tensor) -> bool:
        """Whether it has these rows, or the same for each row."""
        return self._once and (self._has(x) or x.dim() <= 1)

    def take(self, x: Tensor) -> Tensor:
        if not self._has(x):
            return x
        every = x.new_ones(*self.shape, x.shape[-1])  # of zeros a quotient's gradient would be no number
        every[self.numbers] = x.reshape(-1, *self.shape[1:], x.shape[-1])
        return every

    def give(self, every: Tensor) -> Tensor:
        return every[self.numbers].view(*self.lead, every.shape[-1])


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
