"""Functions that add up along samples: a product with a matrix of zeros and ones that the data makes picks rows as an
index does (the dispatch of a mixture of experts; GShard, Lepikhin et al. 2020, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_PRODUCTS = frozenset(("matmul", "mm", "bmm", "mv", "dot", "linear", "tensordot", "__matmul__", "__rmatmul__"))
_ADDED = frozenset(("addmm", "addbmm", "baddbmm", "addmv"))
"""Of which the first argument is added."""

_SUMS = frozenset(("sum", "mean", "nansum", "nanmean"))


def sums_over_samples(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], n: int, dim: int, of_samples: Callable[[Tensor], bool]
) -> bool:
    """Whether torch's function of that name may add up along the samples of one of its arguments.

    Args:
        n, dim: how many there are, and where in what has more than two dimensions. of_samples: what is made of them.
    """
    for x, d in _contracted(name, args, kwargs):
        among_others = x.dim() > 2 and x.shape[0] % n and n in x.shape and x.shape.index(n) == d  # (experts, N, D)
        if (among_others or (d == (dim if x.dim() > 2 else 0) and x.shape[d] % n == 0)) and of_samples(x):
            return True
    return False


def _contracted(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """(an argument, a dimension of it that is not in the result)."""
    if name == "einsum":
        yield from _in_equation(args)
    elif name in _SUMS and args and isinstance(args[0], Tensor):
        x = args[0]
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        dims = range(x.dim()) if dim is None else dim if isinstance(dim, Sequence) else (dim,)
        yield from ((x, d % x.dim()) for d in dims if type(d) is int and x.dim())
    elif name in _PRODUCTS or name in _ADDED:
        both = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][name in _ADDED :][:2]
        if len(both) == 2 and all(x.dim() for x in both):
            a, b = reversed(both) if name == "__rmatmul__" else both
            if name == "tensordot":
                yield from _in_tensordot(a, b, args[2] if len(args) > 2 else kwargs.get("dims", 2))
            elif name == "linear":  # of a weight that is made of samples
                yield b.t(), 0
            else:
                yield a, a.dim() - 1
                yield b, max(b.dim() - 2, 0)


def _in_equation(args: Sequence[Any]) -> Iterator[tuple[Tensor, int]]:
    equation, *operands = args
    if not isinstance(equation, str):  # lists of numbers: whichever they may be
        yield from ((x, d) for x in args if isinstance(x, Tensor) for d in range(x.dim()))
        return
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    kept = right if arrow else {x for x in left if left.count(x) == 1}
    for term, x in zip(left.split(","), operands, strict=False):
        before, dots, after = term.partition("...")
        between = x.dim() - len(before) - len(after) if dots else 0
        letters = [*before, *["."] * between, *after]
        yield from ((x, d) for d, letter in enumerate(letters) if letter not in kept and (arrow or letter != "."))


def _in_tensordot(a: Tensor, b: Tensor, dims: Any) -> Iterator[tuple[Tensor, int]]:
    if type(dims) is int:
        dims = range(a.dim() - dims, a.dim()), range(dims)
    for x, some in zip((a, b), dims, strict=False):
        yield from ((x, d % x.dim()) for d in (some if isinstance(some, Sequence) else (some,)))
