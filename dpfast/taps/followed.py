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

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Runs
from dpfast.taps.kept_rows import ENTRIES, KEEP, PACK, PICK, PUT, by_index, is_mask
from dpfast.taps.layout import Mixed, Place, Rows, tokens_in
from dpfast.taps.packed import in_samples, rows_of, tensors_of_packed
from dpfast.taps.row_by_row import at_places, made_row_by_row


class Source:
    """What rows are picked out of: a module's input, or what a layer gave within that module's forward.

    Args:
        layer: the module, as errors name it. shape: of the tensor without its last dimension.
        place: of the samples in it; of a module's input that is known once its forward has ended.
    """

    def __init__(self, layer: str, shape: Sequence[int], place: Place = None):
        self.layer, self.shape, self.place = layer, torch.Size(shape), place

    def numbers(self, device: torch.device) -> Tensor:
        """Of its rows, in its shape."""
        return torch.arange(self.shape.numel(), device=device).view(self.shape)

    def samples(self, batch_size: int | None) -> Tensor:
        """The sample of each row, on the CPU."""
        place, n = self.place, batch_size or 0
        if n == 1 or not self.shape.numel():
            return torch.zeros(self.shape.numel(), dtype=torch.int64)
        dim = place.dim if isinstance(place, Rows) else place
        if not isinstance(dim, int) or dim >= len(self.shape) or self.shape[dim] % max(n, 1):
            raise UnsupportedModuleError(
                f"it gets rows that {self.layer} picks out of its input {(*self.shape, '...')}, and where the batch of "
                f"{n} samples is in that is not known ({place}); freeze it, or where samples are sorted by length "
                "leave that to pack_padded_sequence(..., enforce_sorted=False)"
            )
        k = self.shape[dim] // max(n, 1)
        if k != 1 and not isinstance(place, Rows):
            raise UnsupportedModuleError(f"{self.layer}: its input {(*self.shape, '...')} has not {n} samples in {dim}")
        along = torch.arange(self.shape[dim])
        whose = along // k if not isinstance(place, Rows) or place.together else along % n
        return whose.view(-1, *[1] * (len(self.shape) - dim - 1)).expand(self.shape).flatten()

    def tokens(self, shape: Sequence[int]) -> Tensor | None:
        """The numbers of its rows in the order of the tokens (N, T), samples in front; None: they are no tokens."""
        order = tokens_in(self.numbers(torch.device("cpu")).unsqueeze(-1), self.place, shape)
        return order.flatten() if order is not None and order.numel() == self.shape.numel() else None


class Picked:
    """Rows of a tensor.

    Args:
        numbers: of the rows, in the shape of what was picked without its last dimension; None: not known.
        by: what they are picked by; nothing: all, in their order.
        of: what they are picked out of; None: nobody follows them.
        packed: they are a packed sequence's, by samples (N, T).
        each: the shape of one, but for its last dimension.
    """

    def __init__(
        self,
        numbers: Tensor | None,
        by: tuple[Any, ...],
        of: Source | None,
        *,
        packed: bool = False,
        each: Sequence[int] = (),
    ):
        self.numbers, self.by, self.of, self.packed, self.each = numbers, by, of, packed, torch.Size(each)
        self._runs: dict[int, Runs] = {}  # by how many rows a layer saw
        self._outer: Picked | None = None  # what the expert got, within which these are

    def within(self, outer: Picked) -> Picked:
        """The same in an expert that got other rows, of which a look knows."""
        found = Picked(self.numbers, self.by, self.of, packed=self.packed, each=self.each)
        found._outer = outer
        return found

    def place(self, learned: Any) -> Place:
        """Of a layer in the expert: its rows are taken for samples, unless it has been seen to mix them."""
        return learned if isinstance(learned, Mixed) or (isinstance(learned, int) and not self.packed) else 0

    def check(self) -> None:
        """Raises UnsupportedModuleError where it is not known which rows they are."""
        if self.of is None:
            raise UnsupportedModuleError(
                "it is one of a block's experts, and runs outside of that block's forward (a checkpoint within it, or "
                "another module that calls it), so whose its rows are is not known; checkpoint the whole block, call "
                "it there, or freeze it"
            )
        if self.numbers is None:
            raise UnsupportedModuleError(
                f"it gets rows that {self.of.layer} makes out of its input in a way that is not followed; pick them "
                "from that input as it is, x[rows], or freeze it"
            )

    def by_samples(self) -> Picked | None:
        """The same as rows of all that stand together, (N, ...) each; None where they are not whole, in dimension 0."""
        if self.of is None or self.numbers is None or self.packed or self.numbers.dim() < 2:
            return None
        each, whole = self.numbers.flatten(1), self.of.numbers(self.numbers.device)[:1].flatten()
        k = len(whole)
        if not k or self.numbers.shape[1:] != self.of.shape[1:] or not torch.equal(each, each[:, :1] // k * k + whole):
            return None
        rows = Source(self.of.layer, self.of.shape[:1], self.of.place)
        return Picked(each[:, 0] // k, self.by, rows, each=self.of.shape[1:])

    def is_at_places(self, rows: int) -> bool:
        """Whether so many rows are all that there are to pick."""
        return self.of is not None and self.of.shape.numel() == rows

    def alone(self, x: Tensor) -> Tensor:
        """Of rows that stand at their places among all, or of their fingerprints; zeros for the others, copies."""
        numbers = None if self.numbers is None else self.numbers.flatten().to(x.device)
        if numbers is None or not x.dim() or not self.is_at_places(len(x)):
            return x
        return torch.zeros_like(x).index_copy(0, numbers, x[numbers])

    def is_one_each(self, rows: int) -> bool:
        """Whether they are a row of each sample, in the samples' order, out of so many."""
        if self.of is None or self.numbers is None or type(self.of.place) is not int or self.of.shape.numel() != rows:
            return False
        n = self.of.shape[self.of.place]
        return torch.equal(self.of.samples(n)[self.numbers.cpu()], torch.arange(n))

    def shape_by(self, dim: int) -> tuple[int, ...]:
        """Of the rows, with that dimension in front."""
        if self.numbers is None:
            return ()
        return tuple((self.numbers.movedim(dim, 0) if dim < self.numbers.dim() else self.numbers).shape)

    def _may_be(self, constant: Sequence[int], rows: int, dim: int) -> bool:
        """Whether a layer's input of that shape, through which no gradient goes, is what was picked."""
        if self.numbers is None:
            return False
        if dim >= self.numbers.dim() or rows >= self.numbers.numel():
            return True
        picked = self.numbers.movedim(dim, 0).shape
        return tuple(constant[: len(picked)]) == picked

    def numbers_of(self, rows: int, constant: Sequence[int] | None) -> Tensor | None:
        """Of so many rows that a layer gives: of all, where those that were picked stand at their places, or of these;
        None where it gives others. constant: as of :meth:`runs`."""
        if self.of is None or self.numbers is None:
            return None
        samples, entries = self.of.shape.numel(), self.each.numel()
        if self.each and rows == samples * entries != samples:  # of samples, one after the other
            return torch.arange(samples).repeat_interleave(entries)
        if constant is not None and tuple(constant[1 : 1 + len(self.each)]) != self.each:  # shared
            return None
        if rows == samples:
            return torch.arange(rows)
        if constant is not None and not self._may_be(constant, rows, 0):
            return None
        each = self.numbers.flatten(1) if self.numbers.dim() > 1 else self.numbers.unsqueeze(1)
        return each[:, 0] if len(each) == rows else self.numbers.flatten() if self.numbers.numel() == rows else None

    def runs(
        self, units: Any, batch_size: int | None, rows: int, dim: int, constant: Sequence[int] | None = None
    ) -> Runs:
        """Whose they are.

        Args:
            units: of tokens; None: samples are asked for. rows: how many the layer saw, in that dimension: what was
                picked, row by row, or whole samples.
            constant: the shape of the layer's input, samples in front, where no gradient goes through it.

        Raises:
            UnsupportedModuleError: that is not known.
        """
        self.check()
        assert self.of is not None and self.numbers is not None
        if constant is not None and not (self._outer or self)._may_be(constant, rows, dim):
            raise UnsupportedModuleError(
                f"its input {tuple(constant)} is not what {self.of.layer} picks, "
                f"{(self._outer or self).shape_by(dim)}, nor made of it by what has gradients: positions or a "
                "table that all samples share, most likely, which nobody can tell from samples in an expert; give each "
                "sample that is picked its own row, or freeze it"
            )
        if rows not in self._runs:
            whose = self.of.samples(batch_size) if units is None else units.of_rows(self.of)
            whose, number = whose[self.numbers.cpu()], (batch_size or 0) if units is None else units.num_units
            if dim < whose.dim() and whose.shape[dim] != rows == whose.numel():
                raise UnsupportedModuleError(
                    f"it gets {rows} rows made of {tuple(whose.shape)} that {self.of.layer} picks, in an order that is "
                    "not followed; make one dimension of several where they come in (x.flatten(0, 1)), or freeze it"
                )
            if dim < whose.dim() and whose.shape[dim] == rows < whose.numel():
                whose = whose.movedim(dim, 0).flatten(1)
                if bool((whose != whose[:, :1]).any()):
                    raise UnsupportedModuleError(
                        f"it gets {tuple(whose.shape)} rows that {self.of.layer} picks, several samples' (or units') "
                        "together in one; call it with (R, D), a row for each that was picked, or freeze it"
                    )
                whose = whose[:, 0]
            self._runs[rows] = Runs(whose.flatten(), number)
        return self._runs[rows]


class Following(TorchFunctionMode):
    """Follows rows in one forward of a module: of its input, and of what layers give within it.

    Args:
        layer: the module, as errors name it. inputs: of which the first tensor of numbers, (..., D), is followed, and
            each of whole numbers, entry by entry (tokens, for a table). place: of the samples in one of them; None: it
            is known once the module's forward has ended. trial: no row's bits may depend on how many others there are.
    """

    def __init__(
        self, layer: str, inputs: Any, place: Callable[[Tensor], Place] = lambda x: None, *, trial: bool = False
    ):
        super().__init__()
        self.trial = trial
        x = next((x for x in inputs if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1), None)
        self.source = Source(layer, (0,) if x is None else x.shape[:-1], None if x is None else place(x))
        self._seen: dict[int, tuple[Tensor, int, Picked]] = {}
        if x is not None:
            self._note(x, Picked(self.source.numbers(x.device), (), self.source))
        for x in inputs:
            if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim():
                entries = Source(layer, x.shape, place(x))
                self._note(x, Picked(entries.numbers(x.device), (), entries))

    def _note(self, x: Tensor, picked: Picked) -> None:
        self._seen[id(x)] = x, x._version, picked  # held, or another might have its id

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

    def gave_packed(self, packed: PackedSequence, output: Any) -> None:
        """A layer has given that of a packed sequence, whose rows stand where those stood."""
        rows = self.picked(packed.data)
        for x in tensors_of_packed(output):
            if rows is not None and rows.numbers is not None and x.shape[:-1] == rows.numbers.shape:
                self._note(x, rows)

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

    def knows_nothing_of(self, tensors: Sequence[Tensor]) -> None:
        """Whose rows those have that are not known by now."""
        for x in tensors:
            if x.is_floating_point() and self.picked(x) is None:
                self._note(x, Picked(None, (None,), self.source))

    def picked(self, x: Any) -> Picked | None:
        """The rows that a tensor has; None where that is not known."""
        found = self._seen.get(id(x))
        return found[2] if found is not None and found[1] == x._version else None

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
        if func not in KEEP and func not in PUT:
            made_of, each = made_row_by_row(func, args, kwargs)
            rows = [self.picked(x) if isinstance(x, Tensor) and x.is_floating_point() else None for x in made_of]
            sources = [] if each and None in rows else [picked for picked in rows if picked is not None]
            for picked in sources[:1] if self.trial and not each else ():
                if picked.by and picked.numbers is not None and picked.of is not None:
                    func = at_places(func, picked.numbers, picked.of.shape.numel())
            result = func(*args, **kwargs)
            if sources and isinstance(result, Tensor):
                self._note_row_by_row(result, sources, each)
            return result
        source = self.picked(args[0]) if args and id(args[0]) in self._seen else None
        result = func(*args, **kwargs)
        if source is None or source.numbers is None:
            return result
        if func in PUT:
            if not kwargs and self._is_put_back(source, *args[1:]):
                self._note(args[0] if result is None else result, source)
            return result
        last = args[0].shape[source.numbers.dim() :]  # none of entries
        try:
            found = KEEP[func](source.numbers, result, *args[1:], **kwargs) if last or func in ENTRIES else None
        except (TypeError, IndexError):  # arguments by names, or dimensions counted from behind
            found = None
        parts = [(result, found)] if isinstance(result, Tensor) else zip(result, found or (), strict=False)
        for x, numbers in parts:
            if numbers is not None and (*numbers.shape, *last) == x.shape:
                by = args[-1] if func in PICK else PACK
                self._note(x, Picked(numbers, (*source.by, by) if func in ENTRIES else source.by, source.of))
        return result

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
