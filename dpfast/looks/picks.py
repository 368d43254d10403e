"""Which modules get rows that the data has picked, out of all samples' rows: seen in a run of a copy on data.

What a layer is called with tells nothing where all rows were picked, or as many as there are samples: a mixture of
experts that sends every token one way looks like any layer. So what is noted is not how many rows came, but that they
were picked by numbers that depend on the data (``x[rows]``, masks, sorting), and in which module's forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpfast.looks.lengths import READ
from dpfast.taps import ASK, WHOLE_ROWS, find_forward, is_pointwise, packed_in, sums_over_samples, tensors_in
from dpfast.trials import Entries, WithoutGradients

_SHAPES_ALONE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "empty_strided")
_OF_NUMBERS = ("tensor", "as_tensor", "asarray", "scalar_tensor")
_FIRST_ALONE = ("expand_as", "view_as", "reshape_as", "type_as", "to")
_SCATTER = ("index_add", "index_copy", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce")


class Routes(NamedTuple):
    """Names of modules.

    Attributes:
        senders: whose forward picks rows. receivers: that are called with them, or may be.
        ways: of taps, by number, to operations on what has no samples that have met such rows.
    """

    senders: frozenset[str]
    receivers: frozenset[str]
    ways: frozenset[tuple[int, Any]] = frozenset()

    def __or__(self, other: Any) -> Routes:
        return Routes(*(own | others for own, others in zip(self, other, strict=True)))


NO_ROUTES = Routes(frozenset(), frozenset())


class _Mark(NamedTuple):
    """What is known of a tensor that depends on the data.

    Attributes:
        sender: the module that has picked its rows; None: nobody has.
        rows: how many those were picked of. as_picked: nothing has been made of them since.
    """

    sender: str | None = None
    rows: int = 0
    as_picked: bool = False


_WHOLE = _Mark()


class Picks(WithoutGradients):
    """Notes what picks rows in one forward pass.

    Args:
        model: which runs. inputs: its tensors. size, dim: how many samples these have, and where.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any], size: int, dim: int):
        super().__init__()
        self.model, self.size, self.dim = model, size, dim
        # By memory: as long as there is a weak reference, no other has its number.
        self._marks: dict[int, tuple[StorageWeakRef, _Mark]] = {}
        self._of_one: dict[
            int, Tensor
        ] = {}  # of one sample each, as x[i] and x.unbind() give it; views, of little memory
        self._running: list[str] = [""]
        self._ran: set[str] = set()
        self._receiver: tuple[str, _Mark] | None = None  # that runs, and of the rows that it got
        self._read = any(isinstance(x, Entries) for x in inputs)  # whether the forward has numbers of the data
        self._receivers: dict[str, str] = {}
        self._met_in: set[str] = set()  # modules whose rows meet parameters, which no module has to itself
        self._trained: dict[int, StorageWeakRef] = {}  # what parameters, and what is made of them alone, stand in
        self._constant: dict[int, StorageWeakRef] = {}  # whole numbers that no value of the data went into
        self._unsure: dict[int, StorageWeakRef] = {}  # of numbers that the forward may have of the data
        self._counts: dict[int, StorageWeakRef] = {}  # real numbers, made of whole numbers and masks of the data
        self._are_constant(model.buffers())
        for x in model.parameters():
            self._are_made_of_parameters([x] if x.requires_grad else [])
        for x in inputs:
            if isinstance(x, Tensor):
                self._set(x, _WHOLE)

    def _set(self, x: Tensor, mark: _Mark) -> None:
        storage = x.untyped_storage()
        self._marks[storage._cdata] = StorageWeakRef(storage), mark

    def _mark(self, x: Any) -> _Mark | None:
        if not isinstance(x, Tensor) or not self._marks or x.layout is not torch.strided:  # a sparse constant
            return None
        found = self._marks.get(x.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _are_made_of_parameters(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if x.layout is torch.strided and x.is_floating_point():
                self._trained[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())

    def _are_constant(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if x.layout is torch.strided and not x.is_floating_point():
                self._constant[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())

    def _is_constant(self, x: Tensor) -> bool:
        return x.layout is not torch.strided or x.untyped_storage()._cdata in self._constant

    def has_picked(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of them has rows that were picked."""
        return self._picked_in(*tensors) is not None

    def _picked_in(self, *inputs: Any) -> _Mark | None:
        with torch._C.DisableTorchFunction():
            marks = [self._mark(x) for x in tensors_in(inputs)]
        return next((mark for mark in marks if mark is not None and mark.sender is not None), None)

    # --- modules ---

    @contextmanager
    def watching(self) -> Iterator[Picks]:
        """The model's forward runs within it."""
        handles = []
        for name, module in self.model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaving(name), with_kwargs=True, always_call=True))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._ran.add(name)
            self._running.append(name)
            if self._receiver is None and not _says_whose(module, args, kwargs):
                mark = self._picked_in(args, kwargs)
                if mark is not None and mark.sender is not None:
                    self._receiver = name, mark._replace(as_picked=False)
                    self._receivers[name] = mark.sender

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._running[-1:] == [name]:
                self._running.pop()
            if self._receiver is None and _says_whose(module, args, kwargs):
                self._set(output, _WHOLE)
            if self._receiver is not None and self._receiver[0] == name:
                with torch._C.DisableTorchFunction():
                    for x in tensors_in(output):  # whatever has been picked, or put somewhere, in it
                        self._set(x, self._receiver[1])
                    for x in tensors_in(_put_back(module, (*args, *kwargs.values()), output)):
                        self._set(x, _WHOLE)
                self._receiver = None

        return leave

    def routes(self) -> Routes:
        """What has been seen. Modules of a sender that did not run may be called with picked rows another time."""
        senders = frozenset(self._receivers.values()) | self._met_in
        receivers = set(self._receivers)
        for name, module in self.model.named_modules():
            above = [name.rpartition(".")[0]] if name else []
            while above and above[-1]:
                above.append(above[-1].rpartition(".")[0])
            of_sender = any(parent in senders for parent in above)
            holds = type(module) in (nn.ModuleList, nn.ModuleDict)
            if name in self._ran or not of_sender or holds or any(parent in receivers for parent in above):
                continue
            receivers.add(name)
        return Routes(senders, frozenset(receivers))

    # --- tensors ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASK:
            return func(*args, **kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if name != "__get__" or isinstance(result, Tensor):  # a shape, most often
            with torch._C.DisableTorchFunction():  # as in Lengths
                self._note(func, name if name.startswith("__") else name.rstrip("_"), args, kwargs, result)
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        made = [args[0]] if name == "__setitem__" else tensors_in(result)
        if name.endswith(_SHAPES_ALONE) or not (made or name in READ):
            self._are_constant(made if name != "new_tensor" else ())
            return
        took = tensors_in(args[:1] if name in _FIRST_ALONE else (args, kwargs))
        marks = [mark for x in took if (mark := self._mark(x)) is not None]
        of_parameters = any(x.layout is torch.strided and x.untyped_storage()._cdata in self._trained for x in took)
        if of_parameters and not marks:
            self._are_made_of_parameters(made)
        if of_parameters and self._receiver is None and func is not F.embedding_bag:  # which says whose they are
            self._met_in |= {mark.sender for mark in marks if mark.sender is not None}
        if not marks:
            self._note_unmarked(name, (*args, *kwargs.values()), took, made)
        if marks:
            self._read |= name in READ
            if self._parts_samples(name, args):
                self._of_one.update({id(x): x for x in made})
            mark = self._of_result(func, name, args, kwargs, marks, result)
            of_counts = [self._is_of_counts(x) for x in took if self._mark(x) is not None]
            counts = any(of_counts) if is_pointwise(name) else all(of_counts) and not of_parameters
            for x in made:
                self._set(x, mark)
                if counts and x.is_floating_point():
                    self._counts[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())

    def _is_of_counts(self, x: Tensor) -> bool:
        return not x.is_floating_point() or x.untyped_storage()._cdata in self._counts

    def _note_unmarked(self, name: str, arguments: Sequence[Any], took: Sequence[Tensor], made: Sequence[Any]) -> None:
        """No tensor of the data went into it; but one of its numbers may, once the forward has some."""
        numbers = name in _OF_NUMBERS or any(isinstance(x, (int, float, list, tuple, slice)) for x in arguments)
        unsure = any(x.layout is torch.strided and x.untyped_storage()._cdata in self._unsure for x in took)
        if unsure or (self._read and numbers):
            for x in made:
                if x.layout is torch.strided:
                    storage = x.untyped_storage()
                    self._constant.pop(storage._cdata, None)
                    self._unsure[storage._cdata] = StorageWeakRef(storage)
        else:
            self._are_constant(made if all(x.is_floating_point() or self._is_constant(x) for x in took) else ())

    def _of_result(self, func: Any, name: str, args: Any, kwargs: Any, marks: list[_Mark], result: Any) -> _Mark:
        if name in _SCATTER or name in ("__setitem__", "masked_scatter"):
            return self._scattered(name, args, kwargs)
        picked = next((mark for mark in marks if mark.sender is not None), None)
        if self._picks_rows(func, name, args, kwargs, result):
            rows = int(next(x for x in tensors_in((args, kwargs)) if x.dim()).shape[0])
            if picked is None:
                return _Mark(self._running[-1], rows, True)
            # Sorted, gone through layers and sorted back: all stand where they stood.
            if not picked.as_picked and result.shape[:1] == (picked.rows,):
                return _WHOLE
        if picked is None:
            return _WHOLE
        return picked if func in WHOLE_ROWS else picked._replace(as_picked=False)

    def _picks_rows(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether rows of all samples are picked by numbers that depend on the data."""
        x = args[0] if args else None
        if func is F.embedding:
            return len(args) > 1 and self._mark(args[1]) is not None
        if sums_over_samples(name, args, kwargs, self.size, self.dim, lambda x: self._mark(x) is not None):
            of_data = (x for x in tensors_in((args, kwargs)) if self._mark(x) is not None)
            return any(map(self._is_of_counts, of_data)) and isinstance(result, Tensor) and result.dim() > 1
        if not isinstance(x, Tensor) or self._mark(x) is None or id(x) in self._of_one:
            return False
        if name == "__getitem__":
            parts = [_part_of(args[1], d, x.dim()) for d in self._dims(x)]
            if self.size in x.shape[1:]:  # positions of the first dimension, most likely, which models slice
                parts = [part for part in parts if not isinstance(part, slice)]
            return any(map(self._is_data, parts))
        if name in ("index_select", "gather", "take_along_dim"):
            rest = [*args[1:], *(kwargs[k] for k in ("dim", "index", "indices") if k in kwargs)]
            dims = {r % max(1, x.dim()) for r in rest if isinstance(r, int)}
            return bool(dims & set(self._dims(x))) and any(map(self._is_data, rest))
        return name == "masked_select"

    def _parts_samples(self, name: str, args: Any) -> bool:
        """Whether that parts samples, which stand in the first dimension and may not stand in another."""
        x, *rest = args or (None,)
        by_one = (name == "unbind" and rest in ([], [0])) or (name == "__getitem__" and type(rest[0]) is int)
        return by_one and isinstance(x, Tensor) and x.shape[:1] == (self.size,) and self.size not in x.shape[1:]

    def _dims(self, x: Tensor) -> list[int]:
        """Where samples may be."""
        first = [0] if x.dim() and x.shape[0] % self.size == 0 else []
        return first + [d for d in range(1, x.dim()) if x.shape[d] == self.size != x.shape[0]]

    def _is_data(self, index: Any) -> bool:
        """Lists and arrays have been tensors, and so may the ends of a slice."""
        if isinstance(index, Tensor):  # or made of what has been read, by torch or another library
            return self._mark(index) is not None or (self._read and not self._is_constant(index))
        if isinstance(index, slice):
            ends = [end for end in (index.start, index.stop) if end is not None]
            return bool(ends) and (self._read or any(self._mark(end) is not None for end in ends))
        return index is not None and not isinstance(index, (int, slice, bool))

    def _scattered(self, name: str, args: Any, kwargs: Any) -> _Mark:
        """Rows that were picked are put back; others are put where the data says."""
        to = self._mark(args[0])
        if to is not None:
            return to
        rest = [*args[1:], *kwargs.values()]
        sources = [x for x in rest if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1]
        marks = [self._mark(x) for x in sources]
        if any(mark is not None and mark.sender is not None for mark in marks):
            return _WHOLE
        if name == "__setitem__":
            by_data = self._is_data(_part_of(args[1], 0, args[0].dim()))
        elif name in ("masked_scatter", "index_put"):
            by_data = True
        else:
            dims = [x for x in rest if isinstance(x, int)]
            by_data = dims[:1] in ([0], [-args[0].dim()]) and any(
                self._mark(x) is not None for x in rest if isinstance(x, Tensor) and not x.is_floating_point()
            )
        if by_data and any(mark is not None for mark in marks):
            return _Mark(self._running[-1], int(sources[0].shape[0]), True)
        return _WHOLE


def _says_whose(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether it is told whose the indices are that it gets: bags begin where its offsets say."""
    return isinstance(module, nn.EmbeddingBag) and any(x is not None for x in (*args[1:2], kwargs.get("offsets")))


def _put_back(module: nn.Module, inputs: Any, output: Any) -> Any:
    """What stands in its samples' order again: the last states of sequences that packing has sorted by length."""
    packed = packed_in(inputs)
    recurrent = isinstance(module, nn.RNNBase) or find_forward(module) is not None
    return output[1] if recurrent and packed is not None and packed.unsorted_indices is not None else ()


def _part_of(index: Any, dim: int, dims: int) -> Any:
    """What of an index stands for a dimension of a tensor that has so many."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(map(_takes, parts))
    first = 0
    for part in parts:
        after = first + (dims - taken if part is Ellipsis else _takes(part))
        if first <= dim < after:
            return None if part is Ellipsis else part
        first = after
    return None


def _takes(part: Any) -> int:
    """How many dimensions."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1
