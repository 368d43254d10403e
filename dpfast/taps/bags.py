"""Bags of an ``nn.EmbeddingBag`` in one row: entries (K,) and offsets, where each bag begins.

A sample is a bag, so what a look exchanges are bags: they stand as rows (N, T), with zeros behind the shorter ones,
beside how many entries each has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpfast.errors import InputError

_NAMES = ("input", "offsets", "per_sample_weights")


class Bags(NamedTuple):
    """Which of a model's inputs are bags, by their numbers.

    Attributes:
        entries: of inputs with entries, the number of their offsets.
        ended: offsets that have the end of the last bag too.
    """

    entries: Mapping[int, int]
    ended: frozenset[int]

    def number(self, leaves: Sequence[Any], n: int) -> int:
        """How many samples there are, where the first tensor is n long."""
        first = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor)), -1)  # it may be a packed sequence
        offsets = self.entries.get(first, first)  # its own
        return len(leaves[offsets]) - (offsets in self.ended) if offsets in self.entries.values() else n

    def dims(self, leaves: Sequence[Any], n: int) -> list[set[int]]:
        """Of each input, those in which samples may be."""
        dims = [{d for d, s in enumerate(x.shape) if s == n} if isinstance(x, Tensor) else set() for x in leaves]
        return [{0} if i in self.entries or i in self.entries.values() else some for i, some in enumerate(dims)]

    def by_sample(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs with entries as rows (N, T), and for offsets how many each sample has, (N,)."""
        found = list(leaves)
        for i, offsets in self.entries.items():
            source, inside = bags_in_rows(len(leaves[i]), leaves[offsets], ended=offsets in self.ended)
            found[i] = picked_or_zeros(leaves[i], source).masked_fill(~inside, 0)
            found[offsets] = inside.sum(1).to(leaves[offsets].dtype)
        return found

    def as_called(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs of :meth:`by_sample`, or others, as the model takes them."""
        found = list(leaves)
        for i, offsets in self.entries.items():
            rows, lengths = leaves[i], leaves[offsets]
            if len(rows) != len(lengths):  # one of them does not follow the batch
                raise InputError("bags are cut otherwise than what says where they begin")
            inside = torch.arange(rows.shape[1], device=rows.device) < lengths.unsqueeze(-1)
            found[i] = rows.flatten() if isinstance(rows, FakeTensor) else rows[inside]  # which has no lengths
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths.dtype)
            found[offsets] = ends if offsets in self.ended else ends[:-1]
        return found

    def says_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> bool:
        """Whether a module gets bags by offsets that are an input; of the model's inputs, as it takes them.

        Raises:
            OtherBags: which are not known as such. InputError: whose entries cannot be told.
        """
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        some = [given.get(name) for name in _NAMES]
        if not isinstance(module, nn.EmbeddingBag) or not all(isinstance(x, Tensor) for x in some[:2]):
            return False
        indices, offsets, weights = (_number_of(x, leaves) for x in some)
        if offsets is None:
            if any(isinstance(x, Tensor) and _are_one(x, some[1]) for x in leaves):
                raise InputError("bags in one row, by offsets that are a part of an input")
            return False
        if indices is None:
            indices = self._of_length(len(given["input"]), offsets, leaves)
        entries = {i: offsets for i in (indices, weights) if i is not None}
        ended = frozenset({offsets} if module.include_last_offset else ())
        known = {**entries, **self.entries}
        otherwise = offsets in self.entries.values() and bool(ended) != (offsets in self.ended)
        if otherwise or known | entries != known or not known.keys().isdisjoint(known.values()):
            raise InputError("bags in one row, of which one input says where several begin, or several where one does")
        if known != self.entries:
            raise OtherBags(Bags(known, self.ended | ended))
        return True

    def _of_length(self, length: int, offsets: int, leaves: Sequence[Any]) -> int:
        """The number of the input that entries were made of."""
        found = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.shape == (length,) and i != offsets]
        found = [i for i in found if not leaves[i].is_floating_point()]
        if len(found) != 1 or length == len(leaves[offsets]):
            raise InputError("bags in one row, by offsets, of entries that are no input")
        return found[0]


class OtherBags(InputError):
    """A model takes bags in one row.

    Args:
        bags: with these.
    """

    def __init__(self, bags: Bags):
        super().__init__("bags in one row, by offsets: the batch is not that of the first input")
        self.bags = bags


NO_BAGS = Bags({}, frozenset())


def bags_in_rows(entries: int, offsets: Tensor, *, ended: bool) -> tuple[Tensor, Tensor]:
    """Where bags (N, T) have their entries, of so many in one row, and which places are in the bag, (N, T) bool.

    Args:
        ended: the last of the offsets is the end of the last bag.
    """
    ends = torch.full((1,), entries, dtype=offsets.dtype, device=offsets.device)
    offsets = offsets if ended else torch.cat([offsets, ends])
    lengths = offsets.diff()
    t = int(lengths.max()) if lengths.numel() else 0
    places = torch.arange(t, device=offsets.device)
    inside = places < lengths.unsqueeze(-1)
    return (offsets[:-1].unsqueeze(-1) + places).masked_fill(~inside, 0), inside


def picked_or_zeros(x: Tensor, source: Tensor) -> Tensor:
    """What stands in those places; zeros where nothing does anywhere."""
    return x[source] if x.numel() else x.new_zeros(source.shape)


def _number_of(x: Any, leaves: Sequence[Any]) -> int | None:
    return next((i for i, y in enumerate(leaves) if y is x is not None), None)


def _are_one(x: Tensor, y: Any) -> bool:
    """Whether both stand in the same memory."""
    return x.layout is y.layout is torch.strided and x.untyped_storage()._cdata == y.untyped_storage()._cdata
