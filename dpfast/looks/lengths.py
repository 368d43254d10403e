"""Which of a model's inputs say how long its packed sequences are: other lengths make other shapes, so these are not
exchanged. Followed from the inputs, through whatever is made of them, to where sequences are packed. Likewise which
whole numbers, one a sample, a forward has one taken out of: the longest, most likely, to which it cuts or pads all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from dpfast.taps import ASK, PACK, tensors_in


class Counts(NamedTuple):
    """Whole numbers, one a sample, that may say how long samples are.

    Attributes:
        inputs: the numbers of the inputs that they come of. by_sample: themselves.
    """

    inputs: frozenset[int]
    by_sample: list[int]


READ = ("item", "tolist", "numpy", "__array__", "__int__", "__index__")
"""Names of what takes numbers out of a tensor."""


def not_exchanged(lengths: Set[int | None], leaves: Sequence[Any], dims: Sequence[int | None]) -> set[int | None]:
    """Of the inputs of these numbers those that stay as they are where samples are exchanged: one whole number a
    sample, unless there is nothing else to exchange.

    Args:
        leaves: the inputs. dims: of each, that of its samples.
    """
    follow = [i for i, dim in enumerate(dims) if dim is not None]
    numbers: set[int | None] = {
        i
        for i in follow
        if isinstance(leaves[i], Tensor) and leaves[i].dim() == 1 and not leaves[i].is_floating_point()
    }
    return numbers & lengths if len(numbers) < len(follow) else set()


def longest_of(counts: Iterable[list[int]]) -> list[list[int]]:
    """How long samples may be, where that differs; of what has the same sample for its longest, one."""
    found = [some for some in counts if min(some) < max(some)]
    return list({some.index(max(some)): some for some in reversed(found)}.values())


def longest_among(counts: Iterable[list[int]]) -> list[tuple[int, ...]]:
    """The numbers of the longest samples, each time all that are as long."""
    found = (tuple(i for i, length in enumerate(some) if length == max(some)) for some in counts)
    return list(dict.fromkeys(found))


def in_each_run(size: int, stay: int, counts: Iterable[list[int]], at_once: bool) -> list[tuple[int, ...]]:
    """Which samples are exchanged: the first two and the last, and all of the longest, as the batch is no shorter with
    one of them left.

    Args:
        size: of the batch, of which so many at the end ``stay``. counts: how long they are. at_once: the three in one
            run.
    """
    last = size - stay - 1
    three = tuple(dict.fromkeys((0, 1, last)))
    which = [three[: size - 1]] if at_once else [(j,) for j in three]
    longest = (tuple(j for j in some if j <= last) for some in longest_among(counts))
    return list(dict.fromkeys((*which, *longest)))


def are_of_samples(base: Sequence[Sequence[int]], runs: Sequence[Sequence[Sequence[int]]], most: Sequence[int]) -> bool:
    """Whether lengths that come of no input change where samples are exchanged, and no more of them than samples.

    Args:
        base: in one run, of each time that something is packed, in order of their size. runs: in the others, in which
            so many (``most``) are exchanged.
    """
    if any(list(map(len, run)) != list(map(len, base)) for run in runs):
        return False
    others = [[(Counter(one) - Counter(two)).total() for one, two in zip(base, run, strict=True)] for run in runs]
    turned = zip(*others, strict=True)  # by what is packed
    return bool(base) and all(any(some) and all(n <= m for n, m in zip(some, most, strict=True)) for some in turned)


class Lengths(TorchFunctionMode):
    """Notes it in one forward pass.

    Attributes:
        found: the numbers of the inputs; None among them: of some sequences, not equally long, no input says it.
        counted: those of what is packed, where the forward has them or has made them of its inputs, and others of
            which it has taken one.
        of_no_input: lengths of what is packed, in order of their size, each time that they come of none.
    """

    def __init__(self, inputs: Sequence[Any]):
        super().__init__()
        # By memory: as long as there is a weak reference, no other has its number.
        self._of: dict[int, tuple[StorageWeakRef, frozenset[int]]] = {}
        self._read: frozenset[int] = frozenset()
        self.found: frozenset[int | None] = frozenset()
        self._counts: list[Tensor] = []  # whole numbers, one dimension of them
        self.counted: list[Counts] = []
        self.of_no_input: list[list[int]] = []
        for i, x in enumerate(inputs):
            if isinstance(x, Tensor):
                self._set(x, frozenset((i,)))

    def _set(self, x: Tensor, inputs: frozenset[int]) -> None:
        if x.dim() == 1 and x.dtype in _WHOLE_NUMBERS:
            self._counts.append(x)
        if x.layout is torch.strided:  # others have no memory of their own that could be asked for
            storage = x.untyped_storage()
            self._of[storage._cdata] = StorageWeakRef(storage), inputs

    def _made_of(self, some: Any) -> frozenset[int]:
        storages = [x.untyped_storage() for x in tensors_in(some) if x.layout is torch.strided]
        found = [self._of[storage._cdata][1] for storage in storages if storage._cdata in self._of]
        return frozenset().union(*found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ASK:
            return result
        with torch._C.DisableTorchFunction():  # who follows the model is not to see what is done here: it takes time
            self._note(func, args, kwargs or {}, tensors_in(result))
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        name = getattr(func, "__name__", "")
        if func is PACK:  # lengths that were read before, and are a list, have no history
            inputs = self._made_of(args[1]) or self._read
            self.found |= inputs
            lengths = sorted(args[1].tolist())
            counts = (x.tolist() for x in self._counts if len(x) == len(lengths))
            self.counted += [Counts(inputs, next((some for some in counts if sorted(some) == lengths), []))]
            if not inputs:
                self.of_no_input += [lengths]
                self.found |= {None} if lengths[:1] != lengths[-1:] else set()
        elif made or name in READ:
            inputs = self._made_of((args, kwargs))
            self._read |= inputs if name in READ else frozenset()
            for x in made if inputs else ():
                self._set(x, inputs)
            if name in READ or any(x.dim() == 0 and x.dtype in _WHOLE_NUMBERS for x in made):
                self.counted += [
                    Counts(self._made_of(x), x.tolist())
                    for x in tensors_in((args, kwargs))
                    if any(x is some for some in self._counts)
                ]


_WHOLE_NUMBERS = (torch.int64, torch.int32)
