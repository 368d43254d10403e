"""The kernels and their peers on every layer, each figure next to the device's limit; one row a contender."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from contenders import CONTENDERS, TOLERANCE, error, exact
from layers import KERNEL, LAYERS, Layer
from rows import Rows, reason
from torch import Tensor

from dpfast import kernels
from dpfast.kernels import _launch, _tiles, grouped_norm
from dpfast.kernels.lookup_norm import row_tile
from dpfast.report.timing import copy_bandwidth, gemm_rate, milliseconds

NAMES = tuple(dict.fromkeys(name for named in CONTENDERS.values() for name in named))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def ceilings(device: str) -> dict[str, float]:
    """Measured limits: bytes per second of a copy, FLOP per second of a product in each dtype."""
    rates = {name: gemm_rate(device, dtype) for name, dtype in DTYPES.items()}
    return {"copy": copy_bandwidth(device), **rates}


def limit(verb: str, layer: Layer, ceiling: dict[str, float]) -> dict[str, float]:
    """FLOPs and bytes that the verb cannot do without, and the milliseconds that the slower of the two takes."""
    sizes = (layer.N, layer.T, layer.D, layer.P)
    flops = layer.factors * _launch.flops(KERNEL[verb], *sizes)
    moved = layer.factors * _launch.bytes_moved(KERNEL[verb], *sizes, itemsize=layer.dtype.itemsize)
    rate = ceiling["fp32" if layer.dtype == torch.float32 else "bf16"]
    return {"flops": flops, "bytes": moved, "limit_ms": 1e3 * max(moved / ceiling["copy"], flops / rate)}


def measure(
    rows: Rows,
    ceiling: dict[str, float],
    device: str,
    expired: Callable[[], bool],
    layers: Iterable[Layer] = LAYERS,
    contenders: Iterable[str] = NAMES,
) -> bool:
    """Adds every row that is missing; False where time ran out before the last."""
    for layer in layers:
        todo = [
            (verb, name)
            for verb, name in cells(layer)
            if name in contenders and not rows.has(layer=layer.name, verb=verb, contender=name)
        ]
        if not todo:
            continue
        if expired():
            return False
        inputs = [layer.inputs(device, seed) for seed in range(layer.factors)]
        for verb in dict.fromkeys(verb for verb, _ in todo):
            expected = [exact(verb, *pair) for pair in inputs[:2]]
            # dpfast last: its row says what the others took.
            for name in sorted((name for v, name in todo if v == verb), key="dpfast".__eq__):
                if expired():
                    return False
                rows.add(
                    layer=layer.name,
                    **{size: getattr(layer, size) for size in ("N", "T", "D", "P", "factors")},
                    dtype=str(layer.dtype).removeprefix("torch."),
                    verb=verb,
                    contender=name,
                    ceilings=ceiling,
                    **limit(verb, layer, ceiling),
                    **({"compared_with": peers(rows, layer, verb)} if name == "dpfast" else {}),
                    **cell(verb, name, layer, inputs, expected, device),
                )
            del expected
        del inputs
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return True


def peers(rows: Rows, layer: Layer, verb: str) -> dict[str, float | str]:
    """What the other contenders took on this machine, in milliseconds, or why they have no time."""
    own = (row for row in rows.all() if (row["layer"], row["verb"]) == (layer.name, verb))
    return {row["contender"]: row.get("ms", row.get("note")) for row in own if row["contender"] != "dpfast"}


def cells(layer: Layer) -> Iterator[tuple[str, str]]:
    """(verb, contender) that are measured on the layer: of its kind, and norms only where there are many at once."""
    for verb, contenders in CONTENDERS.items():
        if layer.lookup == (verb == "lookup norm") and (layer.factors == 1 or verb == "direct norm"):
            yield from ((verb, name) for name in contenders)


def cell(
    verb: str, name: str, layer: Layer, inputs: list[tuple[Tensor, Tensor, Tensor]], expected: list[Tensor], device: str
) -> dict:
    """Milliseconds, error, clock and tile; a note in place of the time where the answer is wrong or there is none."""

    def call() -> Iterable[Tensor]:
        if layer.factors > 1 and name == "dpfast":
            activations, backprops, _ = zip(*inputs, strict=True)
            return kernels.grouped_outer_norm(activations, backprops).sq_norm
        return [CONTENDERS[verb][name](*one) for one in inputs]

    try:
        found = max(error(verb, answer, right) for answer, right in zip(call(), expected, strict=False))
        measured = {"error": float(f"{found:.2g}")}
        if not found <= TOLERANCE[name]:
            return {**measured, "note": "wrong: not timed"}
        measured["ms"] = float(f"{milliseconds(call, device):.4g}")
    except Exception as failure:  # a contender that cannot run must not take the others with it
        return {"note": reason(failure)}
    if name == "dpfast":
        measured |= {
            "tile": tile_name(verb, layer, inputs[0][0]),
            "clock_mhz": busy_clock(call, measured["ms"], device),
        }
    return measured


def tile_name(verb: str, layer: Layer, like: Tensor) -> str:
    if layer.factors > 1:
        tile = grouped_norm.thin_tile(layer.D, layer.P, layer.dtype, _launch.arch_of(like))
    elif layer.lookup:
        tile = row_tile(layer.D, _launch.arch_of(like))
    else:
        tile = _tiles.tile(KERNEL[verb], layer.T, layer.D, layer.P, layer.dtype, _launch.arch_of(like))
    blocks = "×".join(str(b) for b in (tile.BLOCK_T, tile.BLOCK_D, tile.BLOCK_P, tile.BLOCK_K) if b)
    return f"{blocks}, {tile.num_warps} warps, {tile.num_stages} stages"


def busy_clock(call: Callable[[], object], ms: float, device: str) -> int | None:
    """The multiprocessors' clock in MHz while the device is at work on `call`."""
    if device != "cuda":
        return None
    for _ in range(min(200, 1 + int(300 / ms))):
        call()
    try:
        clock = torch.cuda.clock_rate()
    except (ModuleNotFoundError, RuntimeError):  # without NVML
        clock = None
    torch.cuda.synchronize()
    return clock
