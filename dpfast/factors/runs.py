"""Whose row is whose: rows brought together by unit, without a loop over units."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import UnitRuns

NOBODY = -1
"""The unit of rows that are nobody's."""


class Bucket(NamedTuple):
    """The units that have equally many rows.

    Attributes:
        units: their numbers, (u,). rows: theirs in order, unit by unit, (u·length,), or the slice that these are.
        length: rows of each.
    """

    units: Tensor
    rows: Tensor | slice
    length: int


class Launch(NamedTuple):
    """Units that kernels read as runs of positions.

    Attributes:
        units: their numbers, (u,). rows: what their positions are counted in: all rows, or these alone, in order.
    """

    units: Tensor
    rows: Tensor | slice
    runs: UnitRuns


class Runs:
    """The rows of each unit, as runs of a stable sort.

    Rows of one number together are a batch (u, length, ·) of its own, so nothing is padded, a unit's numbers are those
    of a sample with as many positions, and there are at most ``√(2R)`` different lengths.

    Args:
        ids: the unit of each of R rows, (R,) int64 in [-1, num_units), in any order; -1: nobody's. Brought to the CPU,
            because shapes follow from it.
        num_units: U; units may have no rows.

    Attributes:
        counts: rows of each unit, (U,) int64. order: the rows that are somebody's, sorted by unit, each unit's in
            their own order. offsets: unit u has ``order[offsets[u]:offsets[u + 1]]``, (U + 1,).
    """

    def __init__(self, ids: Tensor, num_units: int):
        self.ids = ids.cpu()
        self.num_units = num_units
        somebody = self.ids[self.ids != NOBODY]
        self.counts = torch.bincount(somebody, minlength=num_units)
        self.offsets = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])
        self.order = self.ids.argsort(stable=True)[len(self.ids) - len(somebody) :]
        self._ids_on: dict[torch.device, Tensor] = {}
        self._padded: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
        self._launched: dict[Any, list[Launch]] = {}

    def of_rows(self, by_unit: Tensor) -> Tensor:
        """Each row has its unit's number, nobody's rows have 0: (U,) -> (R,)."""
        return torch.cat([by_unit, by_unit.new_zeros(1)])[self.ids_on(by_unit.device)]  # [-1] is the 0

    def ids_on(self, device: torch.device) -> Tensor:
        """``ids`` on that device."""
        if device not in self._ids_on:
            self._ids_on[device] = self.ids.to(device)
        return self._ids_on[device]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The units that have rows, by how many."""
        by_length = self.counts.argsort(stable=True)
        lengths, members = torch.unique_consecutive(self.counts[by_length], return_counts=True)
        found = []
        for length, units in zip(lengths.tolist(), by_length.split(members.tolist()), strict=True):
            if length > 0:
                places = self.offsets[units].unsqueeze(1) + torch.arange(length)
                found.append(Bucket(units, as_slice(self.order[places.flatten()]), length))
        return found

    def padded(self, buckets: tuple[int, ...], length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The units of some buckets, (u,), and their rows as if all had ``length``: (u, length), and which of these
        there are not, (u, length) bool."""
        found = self._padded.get((buckets, length))
        if found is None:
            units = torch.cat([self.buckets[i].units for i in buckets])
            counts, places = self.counts[units].unsqueeze(1), torch.arange(length)
            rows = self.order[(self.offsets[units].unsqueeze(1) + places).clamp(max=len(self.order) - 1)]
            found = self._padded[buckets, length] = units, rows, places >= counts
        return found

    def launches(self, buckets: tuple[int, ...], positions: int, device: torch.device, most: int) -> list[Launch]:
        """The units of some buckets, where a row has so many positions: in one go if each unit's rows stand together
        as it is, else brought together at most ``most`` rows (or one unit) at a time."""
        key = buckets, positions, device, most
        found = self._launched.get(key)
        if found is not None:
            return found
        units = torch.cat([self.buckets[i].units for i in buckets])
        counts, first = self.counts[units], self.order[self.offsets[units]]
        last = self.order[self.offsets[units + 1] - 1]
        if torch.equal(last - first + 1, counts):
            found = [Launch(units, slice(None), _unit_runs(first, counts, positions, device))]
        else:
            found, ends, i = [], counts.cumsum(0), 0
            while i < len(units):
                before = ends[i] - counts[i]
                some = slice(i, max(i + 1, int(torch.searchsorted(ends, before + most, right=True))))
                first = ends[some] - counts[some] - before
                moved = (self.offsets[units[some]] - first).repeat_interleave(counts[some])
                rows = self.order[moved + torch.arange(len(moved))].to(device)
                found.append(Launch(units[some], rows, _unit_runs(first, counts[some], positions, device)))
                i = some.stop
        self._launched[key] = found
        return found

    def sorted_launch(self, positions: int, device: torch.device) -> Launch:
        """All units that have rows, which are counted sorted by unit; nobody's are behind them."""
        key = positions, device
        if key not in self._launched:
            units = torch.cat([bucket.units for bucket in self.buckets])
            runs = _unit_runs(self.offsets[units], self.counts[units], positions, device)
            self._launched[key] = [Launch(units, slice(None), runs)]
        return self._launched[key][0]

    @cached_property
    def is_equal(self) -> bool:
        """Whether every row is somebody's and all units have equally many, which stand together and in order."""
        return len(self.buckets) == 1 and self.buckets[0].rows == slice(0, len(self.ids)) and bool(self.counts.all())

    def among(self, buckets: list[Bucket]) -> tuple[Tensor | slice, Runs]:
        """The rows of these alone, sorted, and whose they are."""
        mine = torch.zeros(self.num_units + 1, dtype=torch.bool)
        for bucket in buckets:
            mine[bucket.units] = True
        rows = mine[self.ids].nonzero().flatten()
        return as_slice(rows), Runs(self.ids[rows], self.num_units)


def _unit_runs(first: Tensor, counts: Tensor, positions: int, device: torch.device) -> UnitRuns:
    places = torch.stack([first, first + counts], dim=1) * positions
    lengths, units = torch.unique_consecutive(counts * positions, return_counts=True)
    return UnitRuns(places.to(device), list(zip(lengths.tolist(), units.tolist(), strict=True)))


def as_slice(rows: Tensor) -> Tensor | slice:
    """Rows that stand one after another need no copy."""
    first = int(rows[0]) if len(rows) else 0
    stands = torch.equal(rows, torch.arange(first, first + len(rows)))
    return slice(first, first + len(rows)) if stands else rows


def take(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Those rows of dimension 0."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows.to(x.device))
