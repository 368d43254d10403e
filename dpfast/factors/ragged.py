"""Gradients of units that have any number of rows each: people with several records, documents of a packed row, samples
whose tokens an expert got.

A rule makes its factor of R rows as if each were a sample: an outer product (R, T, D), (R, T, P), a lookup, or values.
``by_unit(factor, runs)`` makes it the factor of U units, ``G_u = Σ_{r: ids[r] = u} H_r``, where ``runs = Runs(ids, U)``
says whose each row is. All that belong to one step may share their runs; ids are those of rows in the order that the
rule saw, -1 for rows that are nobody's, which add exactly nothing. For tokens that an expert got: ``activations`` (R,
D), ``backprops`` (R, P), ids (R,) the sample of each token, U = N.

Numbers: a unit's are those of a sample with as many positions (norm, bound, gradient: the same bits), so they depend on
its own rows and their order, not on who else is in the batch. Equal runs in order are that very factor (U, k·T, ·).
Clipped sums take the rows as they stand, each with its unit's coefficient; norms bring units of one length together.
Kernels read each unit's rows from where they stand, all units in one launch whose launches are alike.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, accumulating_dtype, bounds, cost, ops, reference, sums, unit_runs
from dpfast.errors import InputError
from dpfast.factors.dense import Dense, Factor
from dpfast.factors.in_runs import InRuns, LookedUpInRuns
from dpfast.factors.lookup import Lookup
from dpfast.factors.outer_product import OuterProduct
from dpfast.factors.reshaped import Blocks, Reshaped
from dpfast.factors.runs import NOBODY, Bucket, Runs, as_slice
from dpfast.factors.runs_in_graph import RunsInGraph


def by_unit(factor: Any, runs: Runs | RunsInGraph) -> Factor:
    """The factor of units from that of rows.

    Raises:
        InputError: other rows than ``runs`` speaks of.
    """
    if factor.num_samples != len(runs.ids):
        raise InputError(f"it saw {factor.num_samples} rows, and it is known of {len(runs.ids)} whose they are")
    if isinstance(factor, Reshaped):
        return Reshaped(by_unit(factor.factor, runs), factor.shape)
    if isinstance(factor, Blocks):
        return Blocks([by_unit(f, runs) for f in factor.factors])
    if hasattr(factor, "by_unit"):
        of_itself: Factor = factor.by_unit(runs)
        return of_itself
    if not hasattr(factor, "together"):
        return _summed(factor, runs)
    of_units: Factor = factor.together(runs.num_units) if runs.is_equal else Ragged(factor, runs)
    return of_units


def on_common_rows(factors: Sequence[Any]) -> tuple[list[Any], Runs]:
    """Factors of the same units' rows, for :func:`merge`; such as have units for samples have a row each.

    Where they have different rows, all of these become rows of one position, of which each kind of factor has its own
    and zeros at the others.
    """
    ragged = [
        f if isinstance(f, Ragged) else Ragged(f, Runs(torch.arange(f.num_samples), f.num_samples)) for f in factors
    ]
    runs = ragged[0].runs
    if all(f.runs is runs for f in ragged):
        return [f.rows for f in ragged], runs
    pieces = [(use.apart(), f.runs) for f in ragged for use in getattr(f.rows, "uses", [f.rows])]
    ids = [runs.ids.repeat_interleave(p.num_samples // max(1, len(runs.ids))) for p, runs in pieces]
    ends = torch.tensor([len(i) for i in ids]).cumsum(0).tolist()
    own = {id(p): slice(end - len(i), end) for (p, _), i, end in zip(pieces, ids, ends, strict=True)}

    def spread(of: Sequence[Any], tensor: Callable[[Any], Tensor]) -> Tensor:
        dtype = functools.reduce(torch.promote_types, (tensor(p).dtype for p in of))
        first = tensor(of[0])
        out = first.new_zeros(ends[-1], *first.shape[1:], dtype=dtype)
        for p in of:
            out[own[id(p)]] = tensor(p)
        return out

    products, lookups = ([p for p, _ in pieces if isinstance(p, kind)] for kind in (OuterProduct, Lookup))
    found: list[Any] = []
    if products:
        found.append(OuterProduct(spread(products, lambda p: p.activations), spread(products, lambda p: p.backprops)))
    if lookups:
        indices, backprops = spread(lookups, lambda p: p.indices), spread(lookups, Lookup.rows)
        found.append(Lookup(indices, backprops, lookups[0].shape[0]))
    return found, Runs(torch.cat(ids), runs.num_units)


def _of_samples(n: int) -> Runs:
    return Runs(torch.arange(n), n)


class Ragged:
    """``G_u = Σ_{r: ids[r] = u} H_r`` of sums over positions.

    Args:
        rows: the factor of R rows: an :class:`OuterProduct`, a :class:`Lookup`, or both of a tied table.
        runs: whose they are.
    """

    def __init__(self, rows: Any, runs: Runs | RunsInGraph):
        self.rows = rows
        self.runs: Any = runs
        self.shape: torch.Size = rows.shape

    @property
    def num_samples(self) -> int:
        return self.runs.num_units

    def materialize(self, scale: float = 1.0) -> Tensor:
        return Parted(self._parts("gradient"), self.runs.num_units, self.rows).materialize(scale)

    def sq_norm(self) -> SquaredNorm:
        if isinstance(self.runs, RunsInGraph):
            return self.runs.sq_norm(self.rows)
        return Parted(self._for_norms(), self.runs.num_units, self.rows).sq_norm()

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        total: Tensor = self.rows.weighted_sum(self.runs.of_rows(coefficients))
        return total

    def materialized(self) -> Dense:
        if isinstance(self.runs, RunsInGraph):
            return self.runs.added(self.rows.materialized())
        return Parted(self._parts("certified"), self.runs.num_units, self.rows).materialized()

    def kept(self) -> Factor:
        """Each unit as a sample with its rows is kept, whoever else there is. For a parameter's only use: several are
        merged as rows, or the units that are not kept would be merged in another way beside some that are."""
        rows = self.rows
        if isinstance(self.runs, RunsInGraph):
            return self.materialized() if getattr(rows, "keeps", False) else self
        keeps = [isinstance(rows, OuterProduct) and rows.keeps_together(b.length) for b in self.runs.buckets]
        if not any(keeps):
            return self
        others = [b for b, keep in zip(self.runs.buckets, keeps, strict=True) if not keep]
        kept = self._parts("certified", without={i for i, keep in enumerate(keeps) if not keep})
        parts: list[Part] = [(units, factor.kept()) for units, factor in kept]
        if others:
            whose, runs = self.runs.among(others)
            parts.append((None, Ragged(rows.taken(whose), runs)))
        return Parted(parts, self.runs.num_units, self.rows)

    def _for_norms(self) -> Iterator[Part]:
        """:meth:`_parts`, but units of several lengths together where rows of zeros change no bit, and, where kernels
        run, all lookups in one go."""
        rows: Any = self.rows
        if (
            isinstance(rows, Lookup)
            and rows.backprops.numel()
            and self.runs.buckets
            and ops.runs_kernels(rows.backprops)
        ):
            launch = self.runs.sorted_launch(rows.indices.shape[1], rows.device)
            yield launch.units, LookedUpInRuns(rows, self.runs.ids_on(rows.device), launch.runs)
            return
        alike: dict[int, Any] = {}
        if isinstance(rows, OuterProduct) and rows.activations.shape[1] == 1 and not ops.runs_kernels(rows.backprops):
            lengths = [bucket.length for bucket in self.runs.buckets]
            for i, way in enumerate(ops.norm_ways(rows.activations, rows.backprops, lengths)):
                if way == "gram":
                    alike.setdefault(cost.gram_positions(lengths[i]), []).append(i)
        alike = {length: tuple(some) for length, some in alike.items() if len(some) > 1}
        yield from self._parts("sq_norm", without={i for some in alike.values() for i in some})
        for length, some in alike.items():
            step = max(1, reference.WORKSPACE_BYTES // max(1, rows.nbytes // max(1, rows.num_samples) * length))
            for units, places, missing in zip(*(x.split(step) for x in self.runs.padded(some, length)), strict=True):
                zeros = missing.flatten().nonzero().flatten()
                yield units, _Gram(rows.taken(places.flatten(), zeros).together(len(units)))

    def _parts(self, verb: unit_runs.Verb, without: Collection[int] = ()) -> Iterator[Part]:
        """The units of each length, as many at a time as fit the workspace, or, where kernels run, of all lengths whose
        launches are alike."""
        a_row = max(1, self.rows.nbytes // max(1, self.rows.num_samples))
        alike = self._launch_classes(verb, without)
        for some in alike.values():
            positions = self.rows.activations.shape[1]
            for launch in self.runs.launches(some, positions, self.rows.device, reference.WORKSPACE_BYTES // a_row):
                rows = self.rows if isinstance(launch.rows, slice) else self.rows.taken(launch.rows)
                yield launch.units, InRuns(rows, launch.runs)
        without = {*without, *(i for some in alike.values() for i in some)}
        for i, bucket in enumerate(self.runs.buckets):
            if i in without:
                continue
            step = len(bucket.units)
            if not isinstance(bucket.rows, slice):
                step = max(1, reference.WORKSPACE_BYTES // max(1, a_row * bucket.length))
            for first in range(0, len(bucket.units), step):
                yield bucket.units[first : first + step], self._part(bucket, slice(first, first + step))

    def _launch_classes(self, verb: unit_runs.Verb, without: Collection[int]) -> dict[Hashable, tuple[int, ...]]:
        """The lengths whose units share launches of kernels, by their numbers."""
        rows, alike = self.rows, defaultdict(list)
        if isinstance(rows, OuterProduct) and rows.shape.numel() and ops.runs_kernels(rows.activations, rows.backprops):
            (_, positions, d), p = rows.activations.shape, rows.backprops.shape[2]
            kind = torch.promote_types(rows.activations.dtype, rows.backprops.dtype), rows.device
            for i, bucket in enumerate(self.runs.buckets):
                t = bucket.length * positions
                shared = None if i in without else unit_runs.launch_class(verb, t, d, p, *kind)
                if shared is not None:
                    alike[shared].append(i)
        return {shared: tuple(some) for shared, some in alike.items()}

    def _part(self, bucket: Bucket, units: slice) -> Any:
        """The ordinary factor of some of a bucket's units."""
        n = len(bucket.units[units])
        first = (units.start or 0) * bucket.length
        of_all = bucket.rows
        if isinstance(of_all, slice):
            first += of_all.start
            rows: Tensor | slice = slice(first, first + n * bucket.length)
        else:
            rows = of_all[first : first + n * bucket.length]
        return self.rows.taken(rows).together(n)


class _Gram(NamedTuple):
    """Outer products whose norms go the Gram way, as each of them without its rows of zeros would."""

    rows: OuterProduct

    def sq_norm(self) -> SquaredNorm:
        return ops.certified_sq_norm(self.rows.activations, self.rows.backprops, way="gram")


Part = tuple[Tensor | None, Any]
"""Numbers of units, (u,), None for all, and their factor."""


class Parted:
    """Gradients of U units, some in one factor, some in another; of those that are in none they are zero.

    Args:
        parts: used once where it is no list. like: has the ``shape``, ``device`` and ``dtype`` of the gradients.
    """

    def __init__(self, parts: Sequence[Part] | Iterator[Part], num_units: int, like: Any):
        self.parts = parts
        self.num_samples = num_units
        self.shape: torch.Size = like.shape
        self.device: torch.device = like.device
        self.dtype: torch.dtype = like.dtype

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(self.num_samples, *shape, dtype=dtype, device=self.device)

    def materialize(self, scale: float = 1.0) -> Tensor:
        values = self._zeros(*self.shape, dtype=self.dtype)
        for units, factor in self.parts:
            _add_to(values, units, factor.materialize(scale))
        return values

    def sq_norm(self) -> SquaredNorm:
        value, upper = self._zeros(), self._zeros()
        for units, factor in self.parts:
            norm = factor.sq_norm()
            _add_to(value, units, norm.value)
            _add_to(upper, units, norm.upper)
        return SquaredNorm(value, upper)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for units, factor in self.parts:
            total += factor.weighted_sum(coefficients if units is None else coefficients[units.to(self.device)])
        return total

    def materialized(self) -> Dense:
        values, errors = self._zeros(*self.shape, dtype=self.dtype), self._zeros()
        norms: list[Part] = []
        for units, factor in self.parts:
            dense = factor.materialized()
            _add_to(values, units, dense.values)
            if dense.error is not None:
                _add_to(errors, units, dense.error)
            norms.append((units, dense.norm))
        return Dense(values, error=errors, norm=self._known(norms))

    def _known(self, norms: list[Part]) -> SquaredNorm | None:
        """The norms of units, each in one part at most, where all parts' are known already."""
        if not norms or any(units is None or norm is None for units, norm in norms):
            return None
        zeros = torch.zeros(1, *self.shape, dtype=self.dtype, device=self.device)
        nothing = Dense(zeros, error=self._zeros()[:1]).sq_norm()
        found = SquaredNorm(*(x.repeat(self.num_samples) for x in nothing))
        for units, norm in norms:
            for of_all, some in zip(found, norm, strict=True):
                of_all.index_copy_(0, units.to(of_all.device), some)  # type: ignore[union-attr]  # not None, see above
        return found

    def kept(self) -> Factor:
        return self


def _add_to(of_all: Tensor, units: Tensor | None, some: Tensor) -> None:
    """What the units of a part have; those of another part have zeros there, of which nothing is changed."""
    if units is None:
        of_all += some
    else:
        of_all.index_copy_(0, units.to(of_all.device), some.to(of_all.dtype))


def _summed(factor: Any, runs: Runs | RunsInGraph) -> Dense:
    """The gradients of rows written out and added by unit, a unit's in their order; no more rows at a time than fit the
    workspace, or than one unit has."""
    if isinstance(runs, RunsInGraph):
        return runs.added(factor.materialized())
    if not hasattr(factor, "taken"):
        dense = factor.materialized()
        return added_by_unit(dense, runs.ids_on(dense.values.device), runs.num_units, runs.counts)
    a_row = max(1, factor.shape.numel() * 4)
    most = reference.WORKSPACE_BYTES // a_row
    parts, first = [], 0
    while first < runs.num_units:
        last = int(torch.searchsorted(runs.offsets, runs.offsets[first] + most, right=True)) - 1
        last = min(max(last, first + 1), runs.num_units)
        rows = runs.order[runs.offsets[first] : runs.offsets[last]]
        dense = factor.taken(as_slice(rows)).materialized()
        ids = (runs.ids[rows] - first).to(dense.values.device)
        parts.append(added_by_unit(dense, ids, last - first, runs.counts[first:last]))
        first = last
    if not parts:
        return factor.taken(slice(0, 0)).materialized()
    errors: list[Any] = [p.error for p in parts]
    return Dense(torch.cat([p.values for p in parts]), error=torch.cat(errors))


def added_by_unit(dense: Dense, ids: Tensor, num_units: int, counts: Tensor) -> Dense:
    """Gradients of rows, added by unit: one addition after the other, whatever else is in the batch."""
    dtype, device = accumulating_dtype(dense.values), dense.values.device
    rows = dense.values.to(dtype).reshape(len(ids), dense.shape.numel())
    values = torch.ops.aten.embedding_dense_backward(rows, ids, num_units, NOBODY, False)

    def by_unit(of_rows: Tensor) -> Tensor:
        total = of_rows.new_zeros(num_units + 1)
        return sums.add_rows(total, ids.where(ids != NOBODY, num_units), of_rows)[:num_units]

    def error() -> Tensor:
        norms, terms = by_unit(sums.row_norm(rows)), counts.to(device)
        total = bounds.chains_error(norms, terms=terms, numel=rows.shape[1], dtype=dtype)
        return total if dense.error is None else total + by_unit(dense.error) * (1.0 + 2.0**-30)

    return Dense(values.view(num_units, *dense.shape), error=error)
