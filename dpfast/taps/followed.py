"""Whose the rows are that a module picks out of what it has: its input, and what layers give within its forward, are
followed through what keeps rows whole. Picking them by index, parting and repeating them, views that keep the last
dimension, what makes each row of one row (``row_by_row``); anything else is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpfast.taps.by_samples import BySamples
from dpfast.taps.kept_rows import ASK, ENTRIES, KEEP, PACK, PICK, PUT, by_index, is_mask
from dpfast.taps.layout import Place, Rows
from dpfast.taps.packed import in_samples, rows_of, tensors_of_packed
from dpfast.taps.passes import unseen
from dpfast.taps.picked import Picked, Source
from dpfast.taps.row_by_row import at_places, made_row_by_row


class Following(TorchFunctionMode):
    """Follows rows in one forward of a module: of its input, and of what layers give within it.

    Args:
        layer: the module, as errors name it. inputs: of which the first tensor of numbers, (..., D), is followed, and
            each of whole numbers, entry by entry (tokens, for a table). place: of the samples in one of them; None: it
            is known once the module's forward has ended. trial: no row's bits may depend on how many others there are.
            n, dim: of the samples, as of :class:`BySamples`.
    """

    def __init__(
        self,
        layer: str,
        inputs: Any,
        place: Callable[[Tensor], Place] = lambda x: None,
        *,
        trial: bool = False,
        n: int | None = None,
        dim: int = 0,
    ):
        super().__init__()
        self.trial = trial
        x = next((x for x in inputs if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1), None)
        self.source = Source(layer, (0,) if x is None else x.shape[:-1], None if x is None else place(x))
        self._seen: dict[int, tuple[Tensor, int, Picked]] = {}
        self._by_samples = BySamples(n, dim, inputs, self._seen)
        if x is not None:
            self._note(x, Picked(self.source.numbers(x.device), (), self.source))
        for x in inputs:
            if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim():
                entries = Source(layer, x.shape, place(x))
                self._note(x, Picked(entries.numbers(x.device), (), entries))

    def _note(self, x: Tensor, picked: Picked) -> None:
        self._seen[id(x)] = x, x._version, picked  # held, or another might have its id

    @unseen
    def gave(self, layer: str, output: Any, place: Callable[[int], Any], *, recurrent: bool = False) -> None:
        """A layer has given that; ``place(rank)`` says where samples are in the first of it. Behind a recurrent one's
        are its states, (layers, N, H)."""
        first, *others = output if type(output) is tuple and output else (output,)
        if isinstance(first, Tensor):
            self._gave(layer, first, place(first.dim()))
        for x in tree_leaves(others) if recurrent else ():
            self._gave(layer, x, 1)

    def _gave(self, layer: str, x: Tensor, place: Any) -> None:
        if x.dim() > 1 and x.is_floating_point() and isinstance(place, (int, Rows)):
            source = Source(layer, x.shape[:-1], place)
            self._note(x, Picked(source.numbers(x.device), (), source))

    @unseen
    def gave_packed(self, packed: PackedSequence, output: Any) -> None:
        """A layer has given that of a packed sequence, whose rows stand where those stood."""
        rows = self.picked(packed.data)
        for x in tensors_of_packed(output):
            if rows is not None and rows.numbers is not None and x.shape[:-1] == rows.numbers.shape:
                self._note(x, rows)

    @unseen
    def gave_rows(self, output: Any, picked: Picked) -> None:
        """A layer has given that of picked rows, one of each."""
        numbers = picked.numbers
        if picked.packed and numbers is not None:
            for x in output if isinstance(output, tuple) and not isinstance(output, PackedSequence) else (output,):
                if isinstance(x, PackedSequence):
                    self._note(x.data, Picked(numbers[rows_of(x)], picked.by, picked.of))
                    continue
                for state in x if isinstance(x, tuple) else (x,):  # (layers, N, D), in the order of its samples
                    if isinstance(state, Tensor) and state.dim() == 3 and state.shape[1] == len(numbers):
                        self._note(state, Picked(numbers[:, 0].expand(state.shape[:2]), picked.by, picked.of))
        elif numbers is not None and not isinstance(output, PackedSequence):
            for x in output if isinstance(output, tuple) else (output,):
                if isinstance(x, Tensor) and x.is_floating_point() and x.shape[:-1] == numbers.shape:
                    self._note(x, picked)

    @unseen
    def knows_nothing_of(self, tensors: Sequence[Tensor]) -> None:
        """Whose rows those have that are not known by now."""
        for x in tensors:
            if x.is_floating_point() and self.picked(x) is None:
                self._note(x, Picked(None, (None,), self.source))

    @unseen
    def picked(self, x: Any) -> Picked | None:
        """The rows that a tensor has; None where that is not known."""
        found = self._seen.get(id(x))
        if found is not None:
            return found[2] if found[1] == x._version else None
        if isinstance(x, Tensor) and (place := self._by_samples.place(x)) is not None:
            self._gave(self.source.layer, x, place)
            return self._seen[id(x)][2]
        return None

    @unseen
    def has_all(self, x: Tensor) -> bool:
        """Whether a tensor whose rows are not known is made of all samples, in an order that no data makes."""
        return self._by_samples.has_all(x)

    @unseen
    def picked_packed(self, x: PackedSequence) -> Picked | None:
        """The same of a packed sequence, by its samples, in the order that they had before torch sorted them; None
        where nothing else has picked them."""
        found = self.picked(x.data)
        if found is None or found.numbers is None:
            return None
        by = tuple(index for index in found.by if index is not x.sorted_indices and index is not PACK)
        if not by:
            return None
        numbers = in_samples(x, found.numbers + 1) - 1
        return Picked(torch.where(numbers < 0, numbers[:, :1], numbers), by, found.of, packed=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASK:
            return func(*args, **kwargs)
        run, each, sources = func, False, []
        with torch._C.DisableTorchFunction():  # what is asked and counted here is no other mode's to see: it takes time
            if func in KEEP or func in PUT:
                followed = args and (id(args[0]) in self._seen or self._by_samples.moves(func, args, kwargs))
                source = self.picked(args[0]) if followed else None
                sources = [] if source is None or source.numbers is None else [source]
            else:
                made_of, each = made_row_by_row(func, args, kwargs)
                rows = [self.picked(x) if isinstance(x, Tensor) and x.is_floating_point() else None for x in made_of]
                sources = [] if each and None in rows else [picked for picked in rows if picked is not None]
                for picked in sources[:1] if self.trial and not each else ():
                    if picked.by and picked.numbers is not None and picked.of is not None:
                        run = at_places(func, picked.numbers, picked.of.shape.numel())
        result = run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if sources and func in PUT:
                if not kwargs and self._is_put_back(sources[0], *args[1:]):
                    self._note(args[0] if result is None else result, sources[0])
            elif sources and func in KEEP:
                self._note_kept(func, args, kwargs, result, sources[0])
            elif sources and isinstance(result, Tensor):
                self._note_row_by_row(result, sources, each)
            self._by_samples.note(func, args, kwargs, result)  # what is not followed may be by samples
        return result

    def _note_kept(self, func: Any, args: Any, kwargs: Any, result: Any, source: Picked) -> None:
        """What a function gives that keeps rows whole, of ``args[0]``, which has those."""
        numbers: Any = source.numbers
        last = args[0].shape[numbers.dim() :]  # none of entries
        try:
            found = KEEP[func](numbers, result, *args[1:], **kwargs) if last or func in ENTRIES else None
        except (TypeError, IndexError):  # arguments by names, or dimensions counted from behind
            found = None
        parts = [(result, found)] if isinstance(result, Tensor) else zip(result, found or (), strict=False)
        for x, numbers in parts:
            if numbers is not None and (*numbers.shape, *last) == x.shape:
                by = args[-1] if func in PICK else PACK
                self._note(x, Picked(numbers, (*source.by, by) if func in ENTRIES else source.by, source.of))

    def _is_put_back(self, to: Picked, index: Any, rows: Any) -> bool:
        """Whether rows are put where they were picked."""
        put = self.picked(rows)
        if put is None or put.numbers is None or to.numbers is None or put.of is not to.of:
            return False
        if is_mask(index) and index.dim() == to.numbers.dim() + 1 and index.shape[-1] == 1:
            index = index.squeeze(-1)
        if isinstance(index, Tensor) and index.dim() > to.numbers.dim():
            return False
        place = by_index(to.numbers, rows, index)
        return place is not None and torch.equal(place, put.numbers)

    def _note_row_by_row(self, result: Tensor, sources: list[Picked], each: bool) -> None:
        """What is made of rows that stand alike has these rows, whatever is broadcast over them.

        Args:
            each: nothing is, and all of them must stand alike.
        """
        lead = result.shape[:-1] if result.dim() else None
        whole = [(x.numbers, x) for x in sources if x.numbers is not None and x.numbers.shape == lead]
        if all(x.numbers is None for x in sources):
            self._note(result, sources[0])
        if not whole or (each and len(whole) < len(sources)):
            return
        if all(numbers is whole[0][0] or torch.equal(numbers, whole[0][0]) for numbers, _ in whole):
            by = next((x.by for _, x in whole if x.by), ())
            self._note(result, Picked(whole[0][0], by, whole[0][1].of))

    def ended(self, output: Any, place: Callable[[int], Any], *, in_expert: bool) -> None:
        """The forward has given that. Its rows are those of the input, and ``place(rank)`` says where samples are."""
        found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        if in_expert:
            self.source.place = "it is in an expert itself"
        elif self.source.place is not None:
            return
        elif not found or found[0].shape[:-1] != self.source.shape:
            self.source.place = f"its output {tuple(found[0].shape) if found else ''} has other rows"
        else:
            self.source.place = place(found[0].dim())

    def __exit__(self, *error: Any) -> None:
        self._seen.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
