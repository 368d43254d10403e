"""Better tiles for the rows of `kernels/_tile_rows.py`, measured on the device: a proposal in that file's format.

For each row, on the first of the layers that the row serves: the row's own tile and its neighbours that fit registers
and shared memory, each compared with fp64 before it is timed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from itertools import product

import torch
from contenders import CONTENDERS, TOLERANCE, error, exact
from layers import KERNEL, LAYERS, Layer
from rows import Rows, reason
from torch import Tensor

from dpfast import kernels
from dpfast.kernels import _launch, _tiles
from dpfast.kernels._tiles import Row, Tile
from dpfast.report.timing import milliseconds

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tile], Tensor]] = {
    "grad_sample": lambda a, b, c, tile: kernels.outer_product(a, b, tile=tile).grad_sample,
    "direct norm": lambda a, b, c, tile: kernels.outer_norm(a, b, tile=tile).sq_norm,
    "Gram norm": lambda a, b, c, tile: kernels.gram_norm(a, b, tile=tile).sq_norm,
    "weighted sum": lambda a, b, c, tile: kernels.weighted_sum(a, b, c, tile=tile).weight,
}
assert CALLS.keys() == CONTENDERS.keys() - {"lookup norm"}  # whose tile is no row of the table

MOST = 24  # tiles of one row
GAIN = 0.97  # of the row's own time, above which a tile is not worth a change
REGISTERS = 192  # fp32 accumulators a thread may hold


def classes(device: str, layers: Iterable[Layer] = LAYERS) -> Iterator[tuple[str, str, Row, Layer]]:
    """(verb, "16-bit" or "fp32", row of the table, the first layer it serves)."""
    arch = _launch.arch_of(torch.empty(0, device=device))
    seen = set()
    for verb, layer in product(CALLS, (layer for layer in layers if not layer.lookup)):
        kind = "fp32" if layer.dtype == torch.float32 else "16-bit"
        rows = _tiles.ROWS[KERNEL[verb], _tiles.family(arch), kind]
        row = next(row for row in rows if row.fits(layer.T, layer.D, layer.P))
        if layer.factors == 1 and (verb, kind, row) not in seen:
            seen.add((verb, kind, row))
            yield verb, kind, row, layer


def candidates(verb: str, layer: Layer, own: Tile, arch: str) -> list[Tile]:
    """The row's own tile, then its neighbours, those with the fewest changes first."""

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
    return sorted(found, key=lambda tile: sum(getattr(tile, name) != getattr(own, name) for name in names))[:MOST]


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


def measure(rows: Rows, device: str, expired: Callable[[], bool], layers: Iterable[Layer] = LAYERS) -> None:
    """Adds a row for every tile that has none, until time runs out."""
    arch = _launch.arch_of(torch.empty(0, device=device))
    for verb, kind, row, layer in classes(device, layers):
        key = {"verb": verb, "arch": _tiles.family(arch), "dtype": kind, "when": when(row), "layer": layer.name}
        todo = [t for t in candidates(verb, layer, row.tile, arch) if not rows.has(**key, tile=asdict(t))]
        if not todo or expired():
            continue
        failures = _run_once_elsewhere(verb, layer, todo, device)
        inputs = layer.inputs(device)
        expected = exact(verb, *inputs)
        for tile, failure in zip(todo, failures, strict=True):
            if expired():
                return
            cell = {"note": failure} if failure else _cell(verb, inputs, expected, tile, device)
            rows.add(**key, tile=asdict(tile), own=tile == row.tile, **cell)


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


def _run_once_elsewhere(verb: str, layer: Layer, tiles: list[Tile], device: str) -> list[str | None]:
    """Why each tile cannot run, or None.

    Fills Triton's cache on disk with all processors, for the compiler takes seconds a tile, and keeps from this process
    what a compiler or a kernel may die of.
    """
    if device != "cuda":
        return [None] * len(tiles)
    workers = min(len(tiles), os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_run_once, verb, layer, tile) for tile in tiles]
        wait(futures)
    return [_failure(future) for future in futures]


def _failure(future: Future) -> str | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return "its process died, or one beside it"


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
