"""Rows that are picked out of a tensor, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Runs
from dpfast.taps.layout import Mixed, Place, Rows, tokens_in
from dpfast.taps.passes import unseen


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

    @unseen
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

    @property
    def is_whole(self) -> bool:
        """Whether they are all, and nobody has picked them."""
        all_there = self.of is not None and self.numbers is not None and self.numbers.numel() == self.of.shape.numel()
        return all_there and not self.by

    def is_at_places(self, rows: int) -> bool:
        """Whether so many rows are all that there are to pick."""
        return self.of is not None and self.of.shape.numel() == rows

    @unseen
    def alone(self, x: Tensor) -> Tensor:
        """Of rows that stand at their places among all, or of their fingerprints; zeros for the others, copies."""
        numbers = None if self.numbers is None else self.numbers.flatten().to(x.device)
        if numbers is None or not x.dim() or not self.is_at_places(len(x)):
            return x
        return torch.zeros_like(x).index_copy(0, numbers, x[numbers])

    @unseen
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
