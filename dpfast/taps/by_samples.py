"""What is made of whole samples, in their order, by functions that are not followed row by row: means over tokens,
a frozen network. Looks see whether that is the batch's order; what none of them may show is one that the data makes, so
what may have such is told apart here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpfast.taps.contracted import sums_over_samples
from dpfast.taps.inputs import tensors_in

_DIM_FIRST = ("select", "narrow", "index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add")
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys((*_DIM_FIRST, "index_copy", "index_fill", "index_reduce"), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk"), (2, 0)),
    **dict.fromkeys(("repeat_interleave", "take_along_dim"), (2, None)),
    "unbind": (1, 0),
}
"""Which may give rows another order along one dimension: where that stands among their arguments, and what it is else;
None: all entries, in one row."""

_ANYWHERE = frozenset(
    (
        *("movedim", "moveaxis", "t", "rot90", "as_strided"),
        *("flip", "fliplr", "flipud", "roll", "msort", "unique", "unique_consecutive", "nonzero", "take", "put"),
        *("masked_select", "masked_scatter", "index_put", "select_scatter", "slice_scatter", "pad_sequence"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "__setitem__"),
    )
)
"""Which may do so along any, or put the samples into another dimension."""

_TRANSPOSED = ("transpose", "swapaxes", "swapdims", "permute")
"""Which put dimensions into other places."""

_AS_THEY_ARE = (Tensor.data.__get__, Tensor.real.__get__, Tensor.imag.__get__)  # type: ignore[attr-defined]


class BySamples:
    """Of one forward.

    Args:
        n: how many samples it has; None: nothing is known here. dim: theirs, in what has more than two dimensions.
        inputs: of the forward. known: by id, what is followed there: a tensor, its version and its rows, all or picked.
    """

    def __init__(self, n: int | None, dim: int, inputs: Sequence[Any], known: Mapping[int, Any]):
        self._n, self._dim, self._known = n, dim, known
        self._made: Any = WeakTensorKeyDictionary()  # in an order that is the same for all data: the version
        self._moved: Any = WeakTensorKeyDictionary()  # maybe not
        for x in inputs if n is not None else ():
            if isinstance(x, Tensor) and n in x.shape[: dim + 1]:
                self._made[x] = _version(x)

    def place(self, x: Tensor) -> int | None:
        """Where a tensor has its samples that is made of theirs; None where it is not known to be."""
        if x.dim() < 2 or not x.is_floating_point() or not self.has_all(x):
            return None
        return next((d for d in ((self._dim, 0) if x.dim() > 2 else (0,)) if x.shape[d] == self._n), None)

    def has_all(self, x: Tensor) -> bool:
        """Whether a tensor is made of all samples in their order, wherever they stand in it."""
        return self._n is not None and x not in self._moved and bool(self._made.get(x) == _version(x))

    def moves(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function may give what is made of samples another order by what the data says."""
        of_torch, *within = (getattr(func, "__module__", None) or "torch").split(".")
        name = getattr(func, "__name__", "")
        name = name if name.startswith("__") else name.rstrip("_")
        if of_torch != "torch" or within[:1] == ["_ops"] or name in _ANYWHERE:
            return True
        if name == "__get__":
            return func not in _AS_THEY_ARE
        if name in ("embedding", "embedding_bag"):  # rows of what is made of samples
            tables = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
            return any(self._is_moved(x) is not None for x in tables)
        if sums_over_samples(name, args, kwargs, self._n or 1, self._dim, lambda x: self._is_moved(x) is not None):
            return True
        if not args or not isinstance(args[0], Tensor):
            return name in _ALONG or name in _TRANSPOSED  # by names
        x = args[0]
        if name == "__getitem__":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            whole = all(isinstance(part, slice) and part == slice(None) for part in parts[: self._dim + 1])
            return not (whole and self._may_have_samples(x))
        if name in _TRANSPOSED:
            dims = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
            if name == "permute":
                return tuple(dims[: self._dim + 1]) != tuple(range(self._dim + 1))
            return len(dims) != 2 or any(type(d) is not int or d % max(x.dim(), 1) <= self._dim for d in dims)
        if name not in _ALONG:
            return False
        at, dim = _ALONG[name]
        dim = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else dim))
        return type(dim) is not int or not self._may_have_samples(x) or dim % max(x.dim(), 1) <= self._dim

    def _may_have_samples(self, x: Tensor) -> bool:
        """In their dimension, and not in others that were made one with it."""
        return any(size % max(self._n or 0, 1) == 0 for size in x.shape[: self._dim + 1])

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What a function has made."""
        took = [self._is_moved(x) for x in tensors_in((args, kwargs))] if self._n is not None else []
        if all(moved is None for moved in took):
            return
        name, made = getattr(func, "__name__", ""), tensors_in(result)
        if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
            written = tensors_in(args[:1])
            made = [*made, *written, *(x._base for x in written if x._base is not None)]
        if any(took) or self.moves(func, args, kwargs):
            self._moved.update((x, True) for x in made)
        else:
            self._made.update((x, _version(x)) for x in made)

    def _is_moved(self, x: Tensor) -> bool | None:
        """Whether it may stand in another order; None: it is made of no samples."""
        rows = self._known.get(id(x))
        if rows is not None and rows[1] == _version(x):
            return not rows[2].is_whole
        if x in self._made and x not in self._moved:
            return bool(self._made[x] != _version(x))  # something has written to the memory that it stands in
        return True if x in self._moved or rows is not None else None


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
