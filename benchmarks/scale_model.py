"""A step in DDP, FSDP2 or tensor parallel on paper: collectives, bytes and memory a rank from a list of layers.

Nothing runs and no time is told. tests/test_scale.py compares it with counted runs of small models on 2 and 4
processes, whose numbers of collectives and bytes it must give exactly; docs/scale.md has it for models that are not
small. What a rank puts into a collective counts as its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from dpfast.arithmetic import cost

FP32 = 4
RIDERS = 16
"""Numbers that cross ranks beside the sums of the last bucket or unit (docs/distributed.md)."""
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which DDP begins the next bucket, as torch has them."""


@dataclass(frozen=True)
class Layer:
    """One layer with parameters.

    Attributes:
        kind: "linear" (weight (P, D), and a bias), "norm" (D,), "table" (P, D). reads: the tensor that comes in; of a
            table, whose gradient comes back. way: tensor parallel: "column" or "row" of a linear layer, "vocabulary"
            (rows of a table); "" where every rank has it whole. unit: of FSDP2; 0 is what is in no block.
    """

    kind: str
    rows: int
    columns: int
    bias: bool = False
    reads: str = ""
    way: str = ""
    unit: int = 0

    def weight(self, ranks: int = 1) -> tuple[int, ...]:
        """Its shape on the first rank."""
        rows = -(-self.rows // ranks) if self.way in ("column", "vocabulary") else self.rows
        columns = -(-self.columns // ranks) if self.way == "row" else self.columns
        return (columns,) if self.kind == "norm" else (rows, columns)

    def parameters(self, ranks: int = 1) -> Iterator[tuple[int, ...]]:
        """Shapes, in the order of ``parameters()``."""
        weight = self.weight(ranks)
        yield weight
        if self.bias:
            yield weight[:1] if self.way != "row" else (self.rows,)


Model = tuple[Layer, ...]
"""In the order of ``parameters()``."""


def gpt(vocabulary: int, d: int, blocks: int, t: int) -> Model:
    """``workloads.Gpt``."""

    def block(i: int) -> Iterator[Layer]:
        for name in ("x", "y"):
            yield Layer("norm", 1, d, bias=True, reads=f"{name}{i}", unit=i)
        yield Layer("linear", 3 * d, d, True, f"norm of x{i}", "column", i)
        yield Layer("linear", d, d, True, f"attention {i}", "row", i)
        yield Layer("linear", 4 * d, d, True, f"norm of y{i}", "column", i)
        yield Layer("linear", d, 4 * d, True, f"hidden {i}", "row", i)

    return (
        Layer("table", vocabulary, d, reads="x1", way="vocabulary"),
        Layer("table", t, d, reads="x1"),
        *(layer for i in range(1, blocks + 1) for layer in block(i)),
        Layer("norm", 1, d, bias=True, reads="last"),
        Layer("linear", vocabulary, d, False, "norm of last", "column"),
    )


def llama(vocabulary: int, d: int, hidden: int, blocks: int, kv: int | None = None) -> Model:
    """``workloads.Llama`` without LoRA. kv: features of the keys, and of the values, where heads share them."""

    def block(i: int) -> Iterator[Layer]:
        for name in ("x", "y"):
            yield Layer("norm", 1, d, reads=f"{name}{i}", unit=i)
        for rows in (d, kv or d, kv or d):
            yield Layer("linear", rows, d, False, f"norm of x{i}", "column", i)
        yield Layer("linear", d, d, False, f"attention {i}", "row", i)
        for _ in ("gate", "up"):
            yield Layer("linear", hidden, d, False, f"norm of y{i}", "column", i)
        yield Layer("linear", d, hidden, False, f"hidden {i}", "row", i)

    return (
        Layer("table", vocabulary, d, reads="x1", way="vocabulary"),
        *(layer for i in range(1, blocks + 1) for layer in block(i)),
        Layer("norm", 1, d, reads="last"),
        Layer("linear", vocabulary, d, False, "norm of last", "column"),
    )


LLAMA2 = {"7B": llama(32000, 4096, 11008, 32), "70B": llama(32000, 8192, 28672, 80, kv=1024)}
"""Touvron et al. 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models"; the widths are those of the published
checkpoints' config.json, 6,738,415,616 and 68,976,648,192 parameters."""


@dataclass(frozen=True)
class Batch:
    """What one rank computes on: N samples of T positions; bytes of an entry of activations and of gathered
    parameters; the kind of device."""

    n: int
    t: int
    itemsize: int = FP32
    device: str = "cuda"


def numel(model: Model, ranks: int = 1) -> int:
    return sum(prod(shape) for layer in model for shape in layer.parameters(ranks))


# --- what crosses ranks ---


def collectives(model: Model, wrapper: str, ranks: int, batch: Batch, *, private: bool) -> dict[str, dict[str, int]]:
    """{kind: {"calls", "bytes"}} of a step."""
    found: dict[str, Counter[str]] = {}

    def send(kind: str, *sizes: int) -> None:
        found.setdefault(kind, Counter()).update(calls=len(sizes), bytes=sum(sizes))

    riders = FP32 * RIDERS if private else 0
    if wrapper == "DDP":
        sizes = buckets(model)
        send("all-reduce", *sizes[:-1], sizes[-1] + riders)
    elif wrapper == "FSDP2":
        shards = _shards(model, ranks)
        root, blocks = shards[0], shards[1:]
        # A block is gathered again for its backward; what is in no block stays whole from the forward on.
        send("all-gather", *(batch.itemsize * shard for shard in (root, *blocks, *blocks)))
        send("reduce-scatter", *(FP32 * ranks * shard for shard in blocks), ranks * (FP32 * root + riders))
    elif wrapper == "TP":
        rows = batch.n * batch.t * batch.itemsize
        for layer in model:
            if layer.way == "column":
                send("all-reduce", rows * layer.columns)  # its input's gradient
            if layer.way in ("row", "vocabulary"):
                width = layer.rows if layer.kind == "linear" else layer.columns
                send("all-reduce", rows * width)  # its output
        head = model[-1]
        send("all-gather", rows * head.weight(ranks)[0])
        if private:
            send("all-gather", 16 * batch.n + 144)
    return {kind: dict(of) for kind, of in sorted(found.items())}


def buckets(model: Model) -> list[int]:
    """Bytes of DDP's, whose parameters stand in the order in which gradients come."""
    sizes, limit = [0], FIRST_BUCKET
    for layer in reversed(model):
        for shape in reversed(list(layer.parameters())):
            if sizes[-1] >= limit:
                sizes.append(0)
                limit = BUCKET
            sizes[-1] += FP32 * prod(shape)
    return sizes


def _shards(model: Model, ranks: int) -> list[int]:
    """Entries that each rank has of each unit, filled up to equal numbers of rows; what is in no block first."""
    of: Counter[int] = Counter()
    for layer in model:
        for rows, *rest in layer.parameters():
            of[layer.unit] += -(-rows // ranks) * prod(rest)
    return [of[unit] for unit in sorted(of)]


# --- what a rank holds ---


def kept(model: Model, ranks: int, batch: Batch, *, in_turn: bool) -> int:
    """Bytes of the samples' factors when the pass ends: of a layer its gradients, written out (``cost.keeps``), or its
    input and the gradient of its output.

    Args:
        ranks: of tensor parallel, else 1. in_turn: what may be taken in turn waits as inputs.
    """
    total, inputs = 0, {}
    for layer in model:
        rows = batch.t * batch.itemsize
        if layer.kind == "table":
            whole = layer.way == "" or ranks == 1
            inputs["" if whole else f"part of {layer.reads}"] = 8 * batch.t  # indices
            inputs[layer.reads if whole else f"part of {layer.reads}, back"] = rows * layer.columns
            continue
        if layer.kind == "norm":
            total += FP32 * sum(prod(shape) for shape in layer.parameters(ranks))
            continue
        p, d = layer.weight(ranks)
        total += FP32 * sum(prod(shape) for shape in [*layer.parameters(ranks)][1:])
        way = cost.norm_way(batch.t, d, p, torch.device(batch.device))
        size = cost.Size(batch.t, cost.norm_flops(way, batch.t, d, p), FP32 * p * d, rows * (p + d), batch.device)
        if cost.keeps(batch.t, size.gradient, size.inputs) and not (in_turn and cost.waits(size)):
            total += FP32 * p * d
        else:
            inputs[layer.reads] = rows * d
            total += rows * p
    return batch.n * (total + sum(inputs.values()))


def memory(model: Model, wrapper: str, ranks: int, batch: Batch) -> dict[str, int]:
    """Bytes a rank: "parameters" and "gradients" (fp32), "kept", "sums": those on their way at one time at most."""
    mine = numel(model, ranks if wrapper == "TP" else 1)
    in_turn = batch.device == "cpu" and wrapper in ("none", "DDP")
    found = {"kept": kept(model, ranks if wrapper == "TP" else 1, batch, in_turn=in_turn), "sums": 0}
    if wrapper == "DDP":
        found["sums"] = FP32 * (mine + RIDERS)
    if wrapper == "FSDP2":
        shards = _shards(model, ranks)
        mine = sum(shards)
        backward = [FP32 * ranks * shard for shard in (*shards[:0:-1], shards[0] + RIDERS)]
        found["sums"] = max(sum(pair) for pair in zip(backward, [*backward[1:], 0], strict=True))
    return {"parameters": FP32 * mine, "gradients": FP32 * mine, **found}
