"""Better tiles for the rows of `kernels/_tile_rows.py`, measured on the device: a proposal in that file's format.

For each row, on the first of the layers that the row serves: the row's own tile, what `tile_ideas.py` has for it, and
then neighbours that fit registers and shared memory, each compared with fp64 before it is timed. Rows that are worth
most come first, all their ideas before any neighbour. All processors compile ahead of what is timed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from itertools import product
from typing import NamedTuple

import torch
from contenders import CONTENDERS, TOLERANCE, error, exact
from layers import KERNEL, LAYERS, Layer
from rows import Rows, reason
from tile_ideas import IDEAS
from torch import Tensor

from dpfast import kernels
from dpfast.kernels import _launch, _tiles
from dpfast.kernels._tiles import Row, Tile
from dpfast.report.timing import milliseconds

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tile], Tensor]] = {
    "direct norm": lambda a, b, c, tile: kernels.outer_norm(a, b, tile=tile).sq_norm,
    "weighted sum": lambda a, b, c, tile: kernels.weighted_sum(a, b, c, tile=tile).weight,
    "Gram norm": lambda a, b, c, tile: kernels.gram_norm(a, b, tile=tile).sq_norm,
    "grad_sample": lambda a, b, c, tile: kernels.outer_product(a, b, tile=tile).grad_sample,
}
assert CALLS.keys() == CONTENDERS.keys() - {"lookup norm"}  # whose tile is no row of the table

FIRST = ("Llama-3.2-1B up", "GPT-2 up, fp32", "Llama-3.2-1B head")  # whose rows most of a step's time goes to
MOST = 24  # tiles of one row
GAIN = 0.97  # of the row's own time, above which a tile is not worth a change
REGISTERS = 192  # fp32 accumulators a thread may hold


class Search(NamedTuple):
    """A row of the table and the tiles that are tried in its place on a layer that it serves."""

    verb: str
    kind: str  # "16-bit" or "fp32"
    row: Row
    layer: Layer
    tiles: list[Tile]


def classes(device: str, layers: Iterable[Layer] = LAYERS) -> Iterator[tuple[str, str, Row, Layer]]:
    """(verb, "16-bit" or "fp32", row of the table, the first layer it serves), those first that are worth most."""
    arch = _launch.arch_of(torch.empty(0, device=device))
    seen = set()
    ordered = sorted((layer for layer in layers if not layer.lookup), key=_worth)
    for layer, verb in product(ordered, CALLS):
        kind, tile = _kind(layer), _tiles.tile(KERNEL[verb], layer.T, layer.D, layer.P, layer.dtype, arch)
        row = next(row for row in _tiles.ROWS[KERNEL[verb], _tiles.family(arch), kind] if row.tile is tile)
        if layer.factors == 1 and (verb, kind, row) not in seen:
            seen.add((verb, kind, row))
            yield verb, kind, row, layer


def _worth(layer: Layer) -> int:
    return FIRST.index(layer.name) if layer.name in FIRST else len(FIRST)


def _kind(layer: Layer) -> str:
    return "fp32" if layer.dtype == torch.float32 else "16-bit"


def ideas(verb: str, layer: Layer, own: Tile, arch: str) -> list[Tile]:
    """What `IDEAS` has for the verb and dtype; nothing for thin layers and short samples, which have other tiles.

    Whether they fit is not asked: what a larger tile would be worth is seen in spite of spills.
    """
    if _tiles.family(arch) != "sm_90" or min(layer.D, layer.P) < 128 or layer.T < 64:
        return []
    found = []
    for line in IDEAS.strip().splitlines():
        fields, _ = line.split(" | ")
        verbs, kind, blocks, warps, stages, load = fields.split()
        if KERNEL[verb] in verbs.split(",") and kind == _kind(layer):
            parsed = _tiles._parse(
                f"{KERNEL[verb]} {arch} {kind} * {blocks} {warps} {stages} {own.PART} {load} | an idea"
            )
            ((row,),) = parsed.values()
            found.append(replace(row.tile, source=own.source))
    return [tile for tile in found if tile != own]


def candidates(verb: str, layer: Layer, own: Tile, arch: str) -> list[Tile]:
    """The row's own tile, the ideas for it, then its neighbours, those with the fewest changes first."""

    def near(block: int) -> tuple[int, ...]:
        return (block, block // 2, block * 2) if block else (0,)

    choices = product(
        near(own.BLOCK_T),
        near(own.BLOCK_D),
        near(own.BLOCK_P),
        near(own.BLOCK_K),
        (own.num_warps, 12 - own.num_warps),  # 4 and 8
        sorted({own.num_stages, *range(2, 6)}, key=lambda stages: abs(stages - own.num_stages)),
        (own.TMA, not own.TMA),
    )
    names = ("BLOCK_T", "BLOCK_D", "BLOCK_P", "BLOCK_K", "num_warps", "num_stages", "TMA")
    found = [replace(own, **dict(zip(names, choice, strict=True))) for choice in choices]
    found = [tile for tile in found if tile == own or fits(verb, layer, tile, arch)]
    found.sort(key=lambda tile: sum(getattr(tile, name) != getattr(own, name) for name in names))
    return list(dict.fromkeys([own, *ideas(verb, layer, own, arch), *found]))[:MOST]


def fits(verb: str, layer: Layer, tile: Tile, arch: str) -> bool:
    """Whether blocks suit the kernel, its accumulators the registers and its stages the shared memory."""
    if verb == "Gram norm":
        rows, columns, depth, accumulators = tile.BLOCK_T, tile.BLOCK_T, tile.BLOCK_K, 2
    else:
        rows, columns, depth = tile.BLOCK_D, tile.BLOCK_P, tile.BLOCK_T
        accumulators = 1 + (layer.T > _tiles.CHAIN or verb == "weighted sum")
    if min(rows, columns, depth) < 16 or _tiles.CHAIN % depth != 0:
        return False
    held = accumulators * rows * columns / (32 * tile.num_warps)
    stages = tile.num_stages * depth * (rows + columns) * layer.dtype.itemsize
    limit = _tiles.SHARED_MEMORY_LIMIT.get(_tiles.family(arch), float("inf"))  # the interpreter has none
    return held <= REGISTERS and stages <= limit


def searches(rows: Rows, device: str, layers: Iterable[Layer]) -> list[Search]:
    """What there is no row of: first the ideas for the classes that have some, then the neighbours of each."""
    arch = _launch.arch_of(torch.empty(0, device=device))
    rounds: tuple[list[Search], list[Search]] = ([], [])
    for verb, kind, row, layer in classes(device, layers):
        tiles = candidates(verb, layer, row.tile, arch)
        known = len(ideas(verb, layer, row.tile, arch))
        known += known > 0  # the own tile, which they are compared with
        for part, found in zip((tiles[:known], tiles[known:]), rounds, strict=True):
            search = Search(verb, kind, row, layer, part)
            todo = [tile for tile in part if not rows.has(**_key(search, arch), tile=asdict(tile))]
            if todo:
                found.append(search._replace(tiles=todo))
    return [*rounds[0], *rounds[1]]


def _key(search: Search, arch: str) -> dict[str, str]:
    named = {"verb": search.verb, "arch": _tiles.family(arch), "dtype": search.kind}
    return named | {"when": when(search.row), "layer": search.layer.name}


def measure(rows: Rows, device: str, expired: Callable[[], bool], layers: Iterable[Layer] = LAYERS) -> None:
    """Adds a row for every tile that has none, until time runs out."""
    arch = _launch.arch_of(torch.empty(0, device=device))
    todo = searches(rows, device, layers)
    with _run_ahead(((s.verb, s.layer, tile) for s in todo for tile in s.tiles), device) as ahead:
        for search in todo:
            if expired():
                return
            inputs = search.layer.inputs(device)
            expected = exact(search.verb, *inputs)
            for tile in search.tiles:
                if expired():
                    return
                failure = next(ahead).result()
                cell = {"note": failure} if failure else _cell(search.verb, inputs, expected, tile, device)
                rows.add(**_key(search, arch), tile=asdict(tile), own=tile == search.row.tile, **cell)
            del inputs, expected


def _cell(verb: str, inputs: tuple, expected: Tensor, tile: Tile, device: str) -> dict:
    def call() -> Tensor:
        return CALLS[verb](*inputs, tile)

    try:
        found = error(verb, call(), expected)
        if not found <= TOLERANCE["dpfast"]:
            return {"error": found, "note": "wrong: not timed"}
        return {"error": float(f"{found:.2g}"), "ms": float(f"{milliseconds(call, device):.4g}")}
    except Exception as failure:  # a tile that the compiler cannot make is not proposed
        return {"note": reason(failure)}


@contextlib.contextmanager
def _run_ahead(jobs: Iterable[tuple[str, Layer, Tile]], device: str) -> Iterator[Iterator[Future]]:
    """For each job, in their order, why its tile cannot run, or None, as soon as that is known.

    Fills Triton's cache on disk with all processors but two, for the compiler takes seconds a tile, while others are
    timed: of a figure's median a short launch beside it takes nothing. What a compiler or a kernel may die of is kept
    from this process, and from the others: each has one worker, which is replaced.
    """
    here = threading.local()

    def run(job: tuple[str, Layer, Tile]) -> str | None:
        if device != "cuda":
            return None
        if not hasattr(here, "worker"):
            here.worker = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            return here.worker.submit(_run_once, *job).result()
        except BrokenProcessPool:
            del here.worker
            return "alone: its process died"

    threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2))
    try:
        yield iter([threads.submit(run, job) for job in jobs])
    finally:
        threads.shutdown(cancel_futures=True)


def _run_once(verb: str, layer: Layer, tile: Tile) -> str | None:
    try:
        CALLS[verb](*replace(layer, N=min(layer.N, 2)).inputs("cuda"), tile)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"alone: {type(failure).__name__}"
    return None


def when(row: Row) -> str:
    return ",".join(f"{name}{relation}{number}" for name, relation, number in row.conditions) or "*"


def proposal(rows: Rows) -> list[str]:
    """Lines for `kernels/_tile_rows.py`, each to stand before the row whose conditions it has."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows.all():
        if "ms" in row:
            groups.setdefault((row["verb"], row["arch"], row["dtype"], row["when"]), []).append(row)
    lines = []
    for (verb, arch, dtype, conditions), found in groups.items():
        best = min(found, key=lambda row: row["ms"])
        own = next((row for row in found if row["own"]), None)
        if own is not None and best["ms"] < GAIN * own["ms"]:
            tile = Tile(**best["tile"])
            source = f"measured on {best['machine']}, {best['date']}: {best['layer']} {best['ms']} ms, was {own['ms']}"
            lines.append(f"{line(KERNEL[verb], arch, dtype, conditions, tile)} | {source}")
    return lines


def line(verb: str, arch: str, dtype: str, conditions: str, tile: Tile) -> str:
    """A row of the table but for its source."""
    layout = ":flat" if tile.layout == "flat" else ""
    blocks = "".join(f"{axis}{size}" for axis in "TDPK" if (size := getattr(tile, f"BLOCK_{axis}")))
    load = "tma" if tile.TMA else "ptr"
    return f"{verb}{layout} {arch} {dtype} {conditions} {blocks} {tile.num_warps} {tile.num_stages} {tile.PART} {load}"
