"""The kernels' sums, made into norms and their bounds; the one place that imports kernels, when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.arithmetic import bounds, precision
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.finishing import finished
from dpfast.arithmetic.row_norms import taken_once
from dpfast.arithmetic.stacked_kernel_norms import KernelDirect, KernelGram, KernelRankOne, direct_terms, gram_terms
from dpfast.arithmetic.tracing import is_traced

_TILE_SUM = 512  # a kernel sums a tile of at most 256 by 256 entries row by row, then the rows
_PARTS_SUM = 1024  # where T is split, the squares of so many entries of the added parts in one go


@lru_cache(maxsize=1)
def import_kernels() -> tuple[Any, str | None]:
    """(the kernels package, None), or (None, why it cannot be used)."""
    try:
        _find_beside_the_sources()
        return importlib.import_module("dpfast.kernels"), None
    except Exception as error:  # a broken Triton fails in many ways; each means the reference
        return None, f"{type(error).__name__}: {error}"


def _find_beside_the_sources() -> None:
    """Who starts Python in the repository imports this dpfast, not the installed one; its kernels stand beside it."""
    root = Path(__file__).parents[2]
    if find_spec("dpfast.kernels") is None and (root / "kernels" / "_tile_rows.py").is_file():
        sys.modules["dpfast"].__path__.append(str(root))


class UnitRuns(NamedTuple):
    """Units that are runs of one list of rows (1, R, ·), for launches that go over units instead of samples.

    Attributes:
        places: each one's first position and that behind its last, (U, 2) int64, on the rows' device.
        lengths: how many positions they have, as they follow each other: (positions, how many units) each.
    """

    places: Tensor
    lengths: Sequence[tuple[int, int]]

    @property
    def longest(self) -> int:
        return max(length for length, _ in self.lengths)

    def each(self, of_length: Callable[[int], tuple[float, ...]]) -> Tensor:
        """What follows from a unit's length, (k, U) fp64."""
        numbers = torch.tensor([of_length(length) for length, _ in self.lengths], dtype=torch.float64)
        units = torch.tensor([units for _, units in self.lengths])
        return numbers.repeat_interleave(units, dim=0).T.to(self.places.device)


def _launched(activations: Tensor, runs: UnitRuns | None) -> tuple[int, dict[str, Any]]:
    """T, the longest unit's where there are units, and what a launcher has to know of them."""
    if runs is None:
        return activations.shape[1], {}
    return runs.longest, {"runs": runs.places, "longest": runs.longest}


def unfinished(activations: Tensor, backprops: Tensor, way: str) -> KernelDirect | KernelGram | KernelRankOne:
    """What a norm and its bound follow from: the launches that read the inputs, and nothing else."""
    kernels, _ = import_kernels()
    (_, t, d), p = activations.shape, backprops.shape[-1]
    if way == "direct":
        return _unfinished_direct(kernels.outer_norm, activations, backprops)[0]
    if way == "rank_one":
        of_a, of_b = (bounds.dense_terms(width=size, numel=size, dtype=torch.float32) for size in (d, p))
        squares = kernels.row_sq_norm(activations), kernels.row_sq_norm(backprops)
        a, b = (x.squeeze(1) if t else x.new_zeros(x.shape[0]) for x in squares)
        return KernelRankOne((a, b), (*of_a, *of_b))
    norms = row_norm(activations), row_norm(backprops)
    partials = kernels.gram_partials(activations, backprops, row_norm_activations=norms[0], row_norm_backprops=norms[1])
    return KernelGram(partials, norms, terms_of(t, d, p)[0], add_rows)


@lru_cache(maxsize=4096)
def terms_of(t: int, d: int, p: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of a :class:`KernelGram` and a :class:`KernelDirect` of T, D and P."""
    chain = import_kernels()[0].CHAIN
    direct = direct_terms(width=_PARTS_SUM, numel=p * d, positions=t, chain=chain)
    return gram_terms(t=t, d=d, p=p, row=_TILE_SUM, chain=chain), direct


def _unfinished_direct(launcher: Any, activations: Tensor, backprops: Tensor) -> tuple[KernelDirect, Any]:
    """And the launcher's result."""
    (_, t, d), p = activations.shape, backprops.shape[-1]
    left = launcher(activations, backprops, row_products=True, partials=True)
    return KernelDirect(left.sq_norm, left.row_products, terms_of(t, d, p)[1], add_rows), left


def add_rows(rows: Tensor) -> Tensor:
    """Their sums, see ``stacked_kernel_norms.Added``."""
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0])
    sums: Tensor = import_kernels()[0].sum_partials(rows, rows.shape[1])[0]
    return sums


def sq_norm(activations: Tensor, backprops: Tensor, way: str, runs: UnitRuns | None = None) -> SquaredNorm:
    """The kernels' sums, made into a norm and its bound; ``runs`` not with rank one."""
    if way == "direct":
        return direct(activations, backprops, runs=runs).norm
    if runs is None:
        return finished(unfinished(activations, backprops, way))
    kernels, _ = import_kernels()
    norm_a, norm_b = row_norm(activations), row_norm(backprops)
    sums = kernels.gram_norm(
        activations,
        backprops,
        row_norm_activations=norm_a,
        row_norm_backprops=norm_b,
        runs=runs.places,
        longest=runs.longest,
    )
    norm_a, norm_b = norm_a.double(), norm_b.double()
    sum_a, sum_b, products = (kernels.sum_runs(x.flatten(), runs.places) for x in (norm_a, norm_b, norm_a * norm_b))
    return bounds.gram(
        sums.sq_norm.double(),
        sums.bound_activations.double(),
        sums.bound_backprops.double(),
        sums.bound_product.double(),
        sum_a=sum_a,
        sum_b=sum_b,
        row_products=products,
        shape=(runs.each(lambda length: (float(length),))[0], activations.shape[-1], backprops.shape[-1]),
        row=_TILE_SUM,
        dtype=torch.float32,
        kernel_chain=kernels.CHAIN,
    )


def row_norm(x: Tensor) -> Tensor:
    """L2 norms of the rows of what a layer saw, (N, T) fp32, each taken once a step; see ``row_norms``. Of each square
    what may underflow counts as lost."""
    return taken_once(take_row_norm, x)


def take_row_norm(x: Tensor) -> Tensor:
    """The same, taken now."""
    norms: Tensor = import_kernels()[0].row_norm(x)
    return norms


def weighted_rows(values: Tensor, weights: Tensor) -> Tensor:
    """``Σ_n w_n v_n`` of several layers, (L, N, K) and (N,) fp32 to (L, K)."""
    function = _weighted_rows_op if is_traced() else _weighted_rows
    return function(values, weights)


def _weighted_rows(values: Tensor, weights: Tensor) -> Tensor:
    sums: Tensor = import_kernels()[0].weighted_rows(values, weights)
    return sums


_weighted_rows_op = torch.library.custom_op("dpfast::weighted_rows", _weighted_rows, mutates_args=())


@_weighted_rows_op.register_fake
def _(values: Tensor, weights: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], values.shape[2])


@torch.library.custom_op("dpfast::weighted_side_by_side", mutates_args=())
def weighted_side_by_side(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The same of (N, K) each, in a graph one operation, (1, sum of the K): a compiler would copy them one by one."""
    return _weighted_rows(torch.cat([*values], 1).unsqueeze(0), weights)


@weighted_side_by_side.register_fake
def _(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    return weights.new_empty(1, sum(x.shape[1] for x in values))


def normalized_sum(x: Tensor, backprops: Tensor, **of_norm: Any) -> Any:
    """``kernels.normalized_sum`` of (N, T, D); None where its rows are too wide or a layout is not for it."""
    kernels, _ = import_kernels()
    if x.shape[2] > kernels.WIDEST or (x.shape[2] > 1 and (x.stride(2) != 1 or backprops.stride(2) != 1)):
        return None
    return kernels.normalized_sum(x, backprops, **of_norm)


def unit_last_stride(x: Tensor) -> Tensor:
    """The tensor itself where its last dimension has stride 1, as the kernels need it; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def lookup_sq_norm(indices: Tensor, backprops: Tensor, padding_idx: int | None) -> SquaredNorm:
    """‖G_n‖² of a table whose row ``indices[n, t]`` gets ``backprops[n, t]`` (N, T, D), and its bound."""
    function = _lookup_sq_norm_op if is_traced() else _lookup_sq_norm
    return SquaredNorm(*function(indices, backprops, padding_idx))


def _lookup_sq_norm(indices: Tensor, backprops: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    kernels, _ = import_kernels()
    _, t, d = backprops.shape
    sums = kernels.lookup_norm(indices, unit_last_stride(backprops), padding_idx=padding_idx)
    error = bounds.run_error(sums.sq_products.double(), positions=max(1, t), numel=t * d, dtype=torch.float32)
    return bounds.dense(sums.sq_norm.double(), width=sums.width, numel=t * d, dtype=torch.float32, error=error)


def lookup_unit_sq_norm(
    indices: Tensor, backprops: Tensor, padding_idx: int | None, *, entries: int, ids: Tensor, runs: UnitRuns
) -> SquaredNorm:
    """The same of units, (U,), that have any number of the positions (1, R, D): ids (R,) say whose each is, and
    ``runs`` count them sorted by unit."""
    kernels, _ = import_kernels()
    d = backprops.shape[2]
    rows = unit_last_stride(backprops)
    sums = kernels.lookup_norm(indices, rows, padding_idx=padding_idx, entries=entries, ids=ids, runs=runs.places)

    def terms(t: int) -> tuple[float, ...]:
        return *bounds.run_terms(positions=t, numel=t * d, dtype=torch.float32), float(t * d)

    relative, least, numel = runs.each(terms)
    error = relative * sums.sq_products.double().sqrt() + least
    return bounds.dense(sums.sq_norm.double(), width=sums.width, numel=numel, dtype=torch.float32, error=error)


_lookup_sq_norm_op = torch.library.custom_op("dpfast::lookup_sq_norm", _lookup_sq_norm, mutates_args=())


@_lookup_sq_norm_op.register_fake
def _(indices: Tensor, backprops: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    n = backprops.shape[0]
    return backprops.new_empty(n, dtype=torch.float64), backprops.new_empty(n, dtype=torch.float64)


class Direct(NamedTuple):
    """‖G_n‖², how far the computed G_n may be from the exact ones in L2 norm, (N,) fp64, and G (N, P, D) where kept."""

    norm: SquaredNorm
    error: Tensor
    grad_sample: Tensor | None


def direct(activations: Tensor, backprops: Tensor, *, keep: bool = False, runs: UnitRuns | None = None) -> Direct:
    """The norm from the gradient itself, its error from row norms that are taken in the same launch."""
    kernels, _ = import_kernels()
    (_, _, d), p = activations.shape, backprops.shape[-1]
    t, of_units = _launched(activations, runs)
    if groups(t, d, p):
        return grouped([(activations, backprops)], keep=keep, runs=runs)[0]
    if keep and is_traced():  # what follows from the sums is the compiler's, which makes one loop of all layers'
        grad_sample, sums = _kept_op(activations, backprops)
        total, products = sums.double().unbind()
        error = _direct_error(products, t, None, numel=p * d, chain=kernels.CHAIN)
        norm = bounds.dense(total, width=_PARTS_SUM, numel=p * d, dtype=torch.float32, error=error)
        return Direct(norm, error, grad_sample)
    if runs is None:
        launcher = partial(kernels.outer_product, norm=True) if keep else kernels.outer_norm
        left, result = _unfinished_direct(launcher, activations, backprops)
        return Direct(finished(left), left.error(), result.grad_sample if keep else None)
    if keep:
        sums = kernels.outer_product(activations, backprops, norm=True, row_products=True, **of_units)
    else:
        sums = kernels.outer_norm(activations, backprops, row_products=True, **of_units)
    products = sums.row_products.double()
    error = _direct_error(products, t, runs, numel=p * d, chain=kernels.CHAIN)
    norm = bounds.dense(sums.sq_norm.double(), width=_PARTS_SUM, numel=p * d, dtype=torch.float32, error=error)
    return Direct(norm, error, sums.grad_sample if keep else None)


def kept(activations: Tensor, backprops: Tensor) -> tuple[KernelDirect, Tensor]:
    """What the norm follows from, and G (N, P, D) itself."""
    norm, left = _unfinished_direct(partial(import_kernels()[0].outer_product, norm=True), activations, backprops)
    return norm, left.grad_sample


def _direct_error(products: Tensor, t: int, runs: UnitRuns | None, *, numel: int, chain: int) -> Tensor:
    sizes: dict[str, Any] = {"numel": numel, "dtype": torch.float32, "kernel_chain": chain}
    if runs is None:
        return bounds.direct_error(products, positions=t, **sizes)
    relative, least = runs.each(lambda length: bounds.direct_terms(positions=length, **sizes))
    return relative * products + least


def groups(t: int, d: int, p: int) -> bool:
    """Whether pairs of this shape are for :func:`grouped`; the kernels must be there."""
    return import_kernels()[0].groups(t, d, p)


def grouped(
    pairs: Sequence[tuple[Tensor, Tensor]], *, keep: bool = False, runs: UnitRuns | None = None
) -> list[Direct]:
    """The direct norms of many (activations, backprops), the launches as few as there are shapes and layouts."""
    if runs is not None or not is_traced():  # whose a row is is asked of values, which a graph has none of
        return _grouped(pairs, keep=keep, runs=runs)
    flat = _directs_op([a for a, _ in pairs], [b for _, b in pairs], keep)
    width = 4 if keep else 3
    each = (flat[i : i + width] for i in range(0, len(flat), width))
    return [Direct(SquaredNorm(value, upper), error, *(rest or [None])) for value, upper, error, *rest in each]


@torch.library.custom_op("dpfast::kept", mutates_args=())
def _kept_op(activations: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """G (N, P, D), and ‖Ĝ‖² and the sum of ``‖a_t‖‖b_t‖``, (2, N) fp32."""
    kernels, _ = import_kernels()
    left = kernels.outer_product(activations, backprops, norm=True, row_products=True, partials=True)
    sums = left.sq_norm.new_empty(2, len(activations))
    for of, partials in zip(sums, (left.sq_norm, left.row_products), strict=True):
        kernels.sum_partials(partials, partials.shape[1], out=of.unsqueeze(0))
    return left.grad_sample, sums


@_kept_op.register_fake
def _(activations: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    (n, _, d), p = activations.shape, backprops.shape[2]
    return activations.new_empty(n, p, d, dtype=torch.float32), activations.new_empty(2, n, dtype=torch.float32)


@torch.library.custom_op("dpfast::directs", mutates_args=())
def _directs_op(activations: Sequence[Tensor], backprops: Sequence[Tensor], keep: bool) -> list[Tensor]:
    """Of each pair the norm, its bound, the error and, with ``keep``, the gradients; in a graph the launches are one
    operation."""
    results = []
    for of in _grouped(list(zip(activations, backprops, strict=True)), keep=keep):
        own = (*of.norm, of.error, *([of.grad_sample] if keep else []))
        results += [x for x in own if x is not None]
    # Results of one launch are views of one tensor, which an operation's may not be. (Views are not known as such in
    # the first run of a compiled graph, under a mode of torch's.)
    return [x.clone() if len(activations) > 1 or x._is_view() else x for x in results]


@_directs_op.register_fake
def _(activations: Sequence[Tensor], backprops: Sequence[Tensor], keep: bool) -> list[Tensor]:
    found = []
    for a, b in zip(activations, backprops, strict=True):
        (n, _, d), p = a.shape, b.shape[2]
        found += [a.new_empty(n, dtype=torch.float64) for _ in range(3)]
        if keep:
            found.append(a.new_empty(n, p, d, dtype=torch.float32))
    return found


def _grouped(pairs: Sequence[tuple[Tensor, Tensor]], *, keep: bool, runs: UnitRuns | None = None) -> list[Direct]:
    kernels, _ = import_kernels()
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        layout = ((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in pair)
        alike.setdefault(tuple(layout), []).append(i)
    answers: dict[int, Direct] = {}
    for members in alike.values():
        activations, backprops = zip(*(pairs[i] for i in members), strict=True)
        t, of_units = _launched(activations[0], runs)
        sums = kernels.grouped_outer_norm(activations, backprops, keep=keep, **of_units)
        d, p = activations[0].shape[-1], backprops[0].shape[-1]
        # Squares of less than the smallest normal number count as nothing in the kernel.
        products = (sums.sq_products.double() + sums.tiles * precision.smallest_normal(torch.float32)).sqrt()
        error = _direct_error(products, t, runs, numel=p * d, chain=sums.chain)
        norms = bounds.dense(sums.sq_norm.double(), width=_TILE_SUM, numel=p * d, dtype=torch.float32, error=error)
        for j, i in enumerate(members):
            norm = SquaredNorm(norms.value[j], norms.upper[j])
            answers[i] = Direct(norm, error[j], None if sums.grad_sample is None else sums.grad_sample[j])
    return [answers[i] for i in range(len(pairs))]
