"""Which tile a kernel runs with: a pure function of verb, T, D, P, dtype and architecture.

Never of N, so that a sample's norm is bitwise the same in whatever batch it stands, and never measured at
run time. The rows, and what they say of themselves, are data in `_tile_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ._tile_rows import TABLE

VERBS = ("row_sq_norm", "outer_product", "outer_norm", "gram_norm", "weighted_sum")
ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")

# Shared memory that one program may ask for, in bytes, on the smallest part that runs with the architecture's rows:
# sm_80 itself has 163 KiB, sm_86, sm_89 and sm_120 have 99.
SHARED_MEMORY_LIMIT = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}

# Multiprocessors of the architecture's full-size part, the target of `splits`. A constant and not a query:
# the order of addition must not change between two devices of one architecture.
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304, "interpreter": 6}

# Positions (of outer products) or features (of inner products) that the kernels behind norms add in one
# accumulator before they start the next: the bounds of their errors grow with it (docs/bounds.md). Every
# BLOCK_T and BLOCK_K of these kernels divides it.
CHAIN = 128

# What the parts of a T that is split may take at a time: it stays in the L2 cache of every architecture here.
WORKSPACE_BYTES = 32 * 2**20

# Rows of 16 bits that are no multiple of this long are loaded element by element, which takes eleven times as long as
# their product (GPT-2's head on an H200). From so many multiply-adds of a sample on, and so many features or positions
# over which blocks are read again, a copy in longer rows costs less than half of what it saves.
ROW_STEP = 16
_COPY_FROM = 2**26
_COPY_REUSE = 256

# From so many multiply-adds of a sample on, and so many positions, a copy with positions next to each other takes some
# percent of what it saves a Gram norm of fp32.
_TURNED_FROM = 2**26
_TURNED_FROM_T = 128

# At or below this many positions a weighted sum reduces over rows of several samples at once.
_FLAT_MAX_T = 63


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch parameters of one kernel.

    BLOCK_T, BLOCK_D and BLOCK_P block the dimension of that name; BLOCK_K blocks the features that a Gram
    tile reduces over. A block a verb does not use is 0. `layout` matters to weighted sums only: "per_sample"
    weights each sample's fp32 sum, "flat" weights the rows. PART is the least number of positions of a part
    where outer products are split over T; 0 never splits. TMA loads through tensor descriptors where strides allow.
    """

    BLOCK_T: int
    BLOCK_D: int
    BLOCK_P: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    source: str
    layout: str = "per_sample"
    PART: int = 0
    TMA: bool = False


@dataclass(frozen=True)
class Row:
    """One row of the table: the tile of every shape that meets all `conditions`, (name, relation, number) each."""

    conditions: tuple[tuple[str, str, int], ...]
    tile: Tile

    def fits(self, T: int, D: int, P: int) -> bool:
        sizes = {"T": T, "D": D, "P": P, "DP": D * P}
        relations = {"<=": int.__le__, ">=": int.__ge__, "%": lambda size, step: size % step == 0}
        return all(relations[relation](sizes[name], number) for name, relation, number in self.conditions)


def _parse(table: str) -> dict[tuple[str, str, str], tuple[Row, ...]]:
    """{(verb, architecture, "16-bit" or "fp32"): rows in the table's order}."""
    rows: dict[tuple[str, str, str], tuple[Row, ...]] = {}
    for line in table.strip().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        fields, source = line.split(" | ")
        verb, arches, dtype, when, blocks, warps, stages, part, load = fields.split()
        verb, _, layout = verb.partition(":")
        sizes = {"T": 0, "D": 0, "P": 0, "K": 0} | {
            name: int(size) for name, size in re.findall(r"([TDPK])(\d+)", blocks)
        }
        tile = Tile(  # type: ignore[misc]  # the sizes are four
            *sizes.values(),
            num_warps=int(warps),
            num_stages=int(stages),
            source=source.strip(),
            layout=layout or "per_sample",
            PART=int(part),
            TMA=load == "tma",
        )
        conditions = tuple((n, r, int(x)) for n, r, x in re.findall(r"([TDP]+)(<=|>=|%)(\d+)", when))
        for arch in arches.split(","):
            rows[verb, arch, dtype] = (*rows.get((verb, arch, dtype), ()), Row(conditions, tile))
    return rows


ROWS = _parse(TABLE)


def family(arch: str) -> str:
    """The architecture whose rows `arch` runs with.

    sm_8x, sm_12x and later consumer parts have neither warpgroup MMA nor tensor memory and take sm_80's rows.
    """
    if arch == "interpreter" or arch in ARCHES:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    if arch.startswith("sm_") and arch[3:].isdigit() and int(arch[3:]) >= 80:
        return "sm_100" if arch[3:-1] == "10" else "sm_80"
    raise ValueError(f"no tiles for architecture {arch!r}: sm_80 or later, gfx9 or later, or 'interpreter'")


def cdiv(size: int, block: int) -> int:
    """How many blocks hold `size`. (Triton's function of that name, called on the host, unwraps arguments in Python,
    which takes as long as a launch's other half.)"""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 1


@lru_cache(maxsize=4096)
def tile(verb: str, T: int, D: int, P: int, dtype: torch.dtype, arch: str) -> Tile:
    """The tile of `verb` on inputs of T positions, D in-features and P out-features: the first row that fits.

    `dtype` is the dtype the products are taken in: float32 for mixed pairs. For "row_sq_norm", D is the
    length of a row and P is ignored.
    """
    if verb not in VERBS:
        raise ValueError(f"no verb {verb!r}: one of {', '.join(VERBS)}")
    rows = ROWS[verb, family(arch), "fp32" if dtype == torch.float32 else "16-bit"]
    step = row_step(verb, T, D, P, dtype)
    D, P = -(-D // step) * step, -(-P // step) * step
    return next(row.tile for row in rows if row.fits(T, D, P))


def row_step(verb: str, T: int, D: int, P: int, dtype: torch.dtype) -> int:
    """What the length of rows is brought to a multiple of before `verb` reads them: ROW_STEP, or 1 for as they are.

    Of a sample's own sizes, as its tile is: what the copy costs and what it saves both grow with N.
    """
    if dtype == torch.float32 or verb not in ("outer_product", "outer_norm", "gram_norm", "weighted_sum"):
        return 1
    if verb == "gram_norm":
        pays = T >= _COPY_REUSE and T * T * (D + P) >= _COPY_FROM
    else:
        pays = T > _FLAT_MAX_T and min(D, P) >= _COPY_REUSE and T * D * P >= _COPY_FROM
    return ROW_STEP if pays and (D % ROW_STEP or P % ROW_STEP) else 1


def turns(T: int, D: int, P: int, dtype: torch.dtype) -> bool:
    """Whether a Gram norm of fp32 has positions brought next to each other first, by a copy.

    Its products are taken by threads that each read a few positions of one feature from shared memory. Where features
    are next to each other, eight of them at once want the same banks: four times the time of an outer product with as
    many FLOPs (H200).
    """
    return dtype == torch.float32 and T >= _TURNED_FROM_T and T * T * (D + P) >= _TURNED_FROM


def split(tile: Tile, T: int, D: int, P: int, arch: str) -> tuple[int, int]:
    """(parts, positions of a part) of a sample's outer product; a multiple of CHAIN, so that the last may be shorter.

    As many parts as `splits` asks for, each at least PART long, all of them within WORKSPACE_BYTES.
    """
    chains = max(1, -(-T // CHAIN))
    most = 1
    if tile.PART:
        most = min(T // tile.PART, WORKSPACE_BYTES // (4 * P * (D + 1)))
    tiles = -(-D // tile.BLOCK_D) * -(-P // tile.BLOCK_P)
    part = -(-chains // splits(tiles, most, arch)) * CHAIN
    return max(1, -(-T // part)), part


def run_class(verb: str, T: int, D: int, P: int, dtype: torch.dtype, arch: str) -> Hashable:
    """What units of T positions must have alike to be runs of one launch of `verb`.

    Each then has the tile, the parts and the chains, and so the bits, of a sample of T positions, in whatever company.
    Of a Gram norm's programs, which are the longest's pairs for each unit, at least one in four or so has work.
    """
    chosen = tile(verb, T, D, P, dtype, arch), row_step(verb, T, D, P, dtype)
    if verb == "gram_norm":
        return chosen, turns(T, D, P, dtype), (-(-T // chosen[0].BLOCK_T) - 1).bit_length()
    parts, part = split(chosen[0], T, D, P, arch)
    return chosen, parts, part if parts > 1 else 0, T > CHAIN


# FLOPs in the time of a byte, of 16-bit products and of IEEE products of fp32: what large weighted sums and a square
# fp32 product reach on an H200, over the rate of a copy (benchmarks/results/kernels.jsonl: some 600 and 51 TFLOP/s,
# 2.8 TB/s). The other architectures' parts are taken to be not far from these.
_FLOPS_A_BYTE = {"16-bit": 214, "fp32": 18}


def sum_splits(tile: Tile, steps: int, D: int, P: int, dtype: torch.dtype, arch: str) -> int:
    """Into how many parts to split the `steps` of a weighted sum (P, D): what is quickest, counted in bytes.

    Multiprocessors without a program cost time, and so do the parts: each is written and read once more.
    """
    width = _MULTIPROCESSORS[family(arch)]
    programs = max(1, cdiv(P, tile.BLOCK_P) * cdiv(D, tile.BLOCK_D))
    flops = 2 * tile.BLOCK_T * tile.BLOCK_D * tile.BLOCK_P
    of_step = flops * width / _FLOPS_A_BYTE["fp32" if dtype == torch.float32 else "16-bit"]

    def cost(parts: int) -> float:
        written = 4 * P * D * (1 if parts == 1 else 2 * parts + 1)
        return cdiv(programs * parts, width) * cdiv(steps, parts) * of_step + written

    most = max(1, min(steps // 4, 2 * width // programs))  # a part keeps at least four steps
    return min(range(1, most + 1), key=cost)


def splits(programs: int, most: int, arch: str) -> int:
    """Into how many parts, at most `most`, to split a reduction done by `programs` independent programs.

    The smallest number that keeps at least 9 of 10 multiprocessors busy over the whole launch, or the
    best up to one wave (or four parts): every part costs a write and a read of the result.
    """
    width = _MULTIPROCESSORS[family(arch)]
    best, best_share = 1, 0.0
    for count in range(1, max(1, min(most, max(4, width // programs))) + 1):
        waves = -(-programs * count // width)
        share = programs * count / (waves * width)
        if share >= 0.9:
            return count
        if share > best_share:
            best, best_share = count, share
    return best
