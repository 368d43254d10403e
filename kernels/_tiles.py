"""Which tile a kernel runs with: a pure function of verb, T, D, P, dtype and architecture.

Never of N, so that a sample's norm is bitwise the same in whatever batch it stands, and never measured at
run time. The table below comes from static analysis (the compiler's own counts of registers, spills and
shared memory, and the tensor-core instruction it chose); the tests compile every row for every architecture
and hold those facts. Benchmarks on real hardware may replace a row; its `source` then says so.

Rules behind the rows
- Output tiles are 128 wide, or 64 where the dimension is at most 64: 64 rows is the smallest tile that
  warpgroup MMA takes, so thin layers (LoRA) keep the native instruction and waste only masked lanes.
- 16-bit operands are reduced 64 at a time (32 on sm_80, whose row must also fit the 99 KiB of sm_86, sm_89
  and sm_120), so that the stages in flight cover the latency of a load within shared memory.
- Weighted sums take up to seven stages on NVIDIA: the factor is loaded ahead of the rows that its zero masks, and
  the compiler gives each of the two loads half of them.
- Rows whose length is no multiple of 16 are loaded element by element and take smaller tiles.
- fp32 operands are IEEE: fused multiply-adds on the ordinary cores, where a 64×64 tile by 16 is what fits
  the registers without a spill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

VERBS = ("row_sq_norm", "outer_product", "outer_norm", "gram_norm", "weighted_sum")
ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")

# Shared memory that one program may ask for, in bytes.
SHARED_MEMORY_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}

# Multiprocessors of the architecture's full-size part, the target of `splits`. A constant and not a query:
# the order of addition must not change between two devices of one architecture.
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304, "interpreter": 6}

# At or below this many positions a weighted sum reduces over rows of several samples at once.
_FLAT_MAX_T = 63


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch parameters of one kernel.

    BLOCK_T, BLOCK_D and BLOCK_P block the dimension of that name; BLOCK_K blocks the features that a Gram
    tile reduces over. A block a verb does not use is 0. `layout` matters to weighted sums only: "per_sample"
    weights each sample's fp32 sum, "flat" weights the rows.
    """

    BLOCK_T: int
    BLOCK_D: int
    BLOCK_P: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    source: str
    layout: str = "per_sample"


@dataclass(frozen=True)
class _Family:
    """The largest tiles of one architecture, from which the thin ones follow."""

    outer_product: Tile
    outer_norm: Tile
    gram_norm: Tile
    weighted_sum: Tile
    weighted_rows: Tile


def _static(BLOCK_T: int, BLOCK_D: int, BLOCK_P: int, BLOCK_K: int, warps: int, stages: int, why: str) -> Tile:
    return Tile(BLOCK_T, BLOCK_D, BLOCK_P, BLOCK_K, warps, stages, f"from static analysis: {why}")


_SIXTEEN_BIT = {
    "sm_80": _Family(
        outer_product=_static(32, 128, 128, 0, 8, 4, "HMMA, 64 KiB of stages"),
        outer_norm=_static(32, 128, 128, 0, 8, 4, "HMMA, 64 KiB of stages"),
        gram_norm=_static(128, 0, 0, 32, 8, 4, "HMMA, two accumulators of 64 registers"),
        weighted_sum=_static(32, 128, 128, 0, 8, 7, "HMMA, two accumulators of 64 registers"),
        weighted_rows=_static(32, 64, 128, 0, 8, 7, "HMMA, room for the parts of fp16"),
    ),
    "sm_90": _Family(
        outer_product=_static(64, 128, 128, 0, 8, 3, "HGMMA, two programs fit one multiprocessor"),
        outer_norm=_static(64, 256, 128, 0, 8, 4, "HGMMA 64x256, 192 KiB of stages"),
        gram_norm=_static(128, 0, 0, 64, 8, 4, "HGMMA, two accumulators of 64 registers"),
        weighted_sum=_static(64, 128, 128, 0, 8, 7, "HGMMA, two accumulators of 64 registers"),
        weighted_rows=_static(32, 128, 128, 0, 8, 7, "HGMMA, the weighted operand from registers"),
    ),
    "sm_100": _Family(
        outer_product=_static(64, 128, 128, 0, 8, 3, "UTCHMMA, accumulator in tensor memory"),
        outer_norm=_static(64, 256, 128, 0, 8, 4, "UTCHMMA, accumulator in tensor memory"),
        gram_norm=_static(128, 0, 0, 64, 8, 4, "UTCHMMA, both accumulators in tensor memory"),
        weighted_sum=_static(64, 128, 128, 0, 8, 7, "UTCHMMA, a sample's sum in tensor memory"),
        weighted_rows=_static(32, 128, 128, 0, 8, 5, "UTCHMMA, seven stages spill in fp16"),
    ),
    "gfx942": _Family(
        outer_product=_static(64, 128, 128, 0, 8, 2, "mfma, 32 KiB of local memory"),
        outer_norm=_static(64, 128, 128, 0, 8, 2, "mfma, 32 KiB of local memory"),
        gram_norm=_static(128, 0, 0, 64, 8, 2, "mfma, two accumulators of 32 registers"),
        weighted_sum=_static(64, 128, 128, 0, 8, 2, "mfma, two accumulators of 32 registers"),
        weighted_rows=_static(32, 128, 128, 0, 8, 2, "mfma, 16 KiB of local memory"),
    ),
}

_FP32 = _Family(
    outer_product=_static(16, 64, 64, 0, 8, 3, "IEEE multiply-adds, 16 accumulators a thread"),
    outer_norm=_static(16, 64, 64, 0, 8, 3, "IEEE multiply-adds, 16 accumulators a thread"),
    gram_norm=_static(64, 0, 0, 16, 8, 3, "IEEE multiply-adds, twice 16 accumulators a thread"),
    weighted_sum=_static(16, 64, 64, 0, 8, 3, "IEEE multiply-adds, twice 16 accumulators a thread"),
    weighted_rows=_static(16, 64, 64, 0, 8, 3, "IEEE multiply-adds, 16 accumulators a thread"),
)

# Small blocks, so that small inputs have several tiles of each kind. No hardware is described here.
_INTERPRETER = _Family(
    outer_product=_static(32, 64, 64, 0, 4, 1, "interpreter"),
    outer_norm=_static(32, 64, 64, 0, 4, 1, "interpreter"),
    gram_norm=_static(32, 0, 0, 64, 4, 1, "interpreter"),
    weighted_sum=_static(32, 64, 64, 0, 4, 1, "interpreter"),
    weighted_rows=_static(32, 64, 64, 0, 4, 1, "interpreter"),
)


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


@lru_cache(maxsize=4096)
def tile(verb: str, T: int, D: int, P: int, dtype: torch.dtype, arch: str) -> Tile:
    """The tile of `verb` on inputs of T positions, D in-features and P out-features.

    `dtype` is the dtype the products are taken in: float32 for mixed pairs. For "row_sq_norm", D is the
    length of a row and P is ignored.
    """
    if verb not in VERBS:
        raise ValueError(f"no verb {verb!r}: one of {', '.join(VERBS)}")
    arch = family(arch)
    if verb == "row_sq_norm":
        why = "4096 elements a program, 32 a thread"
        return _static(64, 64, 0, 0, 4, 2, why) if D <= 64 else _static(8, 512, 0, 0, 4, 2, why)
    rows = _rows(arch, dtype)
    # The compiler vectorizes rows whose length it knows to be a multiple of 16, and keeps one 64-bit address
    # an element of the others, which the widest 16-bit tiles have no registers for. Thin rows are few enough.
    scattered = dtype != torch.float32 and any(size % 16 != 0 and size > 64 for size in (D, P))
    if verb == "gram_norm":
        aligned = D % 16 == P % 16 == 0
        return _short(rows.gram_norm if aligned else _scattered(rows.gram_norm), T)
    if verb == "weighted_sum" and T <= _FLAT_MAX_T:
        widest = replace(rows.weighted_rows, layout="flat")
    else:
        widest = getattr(rows, verb)
    return _thin(_scattered(widest), D, P) if scattered else _thin(widest, D, P)


def _rows(arch: str, dtype: torch.dtype) -> _Family:
    if arch == "interpreter":
        return _INTERPRETER
    return _FP32 if dtype == torch.float32 else _SIXTEEN_BIT[arch]


def _scattered(widest: Tile) -> Tile:
    """At most 4096 elements of an operand a step, over eight warps."""
    return replace(
        widest,
        BLOCK_T=widest.BLOCK_T if widest.BLOCK_K else min(widest.BLOCK_T, 32),
        BLOCK_D=min(widest.BLOCK_D, 64),
        BLOCK_K=min(widest.BLOCK_K, 32),
        num_stages=min(widest.num_stages, 3),
        num_warps=8,
    )


def _thin(widest: Tile, D: int, P: int) -> Tile:
    """Blocks of 64 where a dimension is at most 64.

    Four warps where that leaves at most 64×128 elements and rows of multiples of 16, see `tile`.
    """
    block_d = min(widest.BLOCK_D, 64) if D <= 64 else widest.BLOCK_D
    block_p = min(widest.BLOCK_P, 64) if P <= 64 else widest.BLOCK_P
    thin = replace(widest, BLOCK_D=block_d, BLOCK_P=block_p)
    if D % 16 != 0 or P % 16 != 0:
        both = block_d * block_p <= 64 * 64
        return replace(thin, num_stages=2) if both else thin
    narrowed = thin != widest and block_d * block_p <= 64 * 128
    return replace(thin, num_warps=4) if narrowed else thin


def _short(widest: Tile, T: int) -> Tile:
    """Gram blocks of 32 or 64 where a sample has no more positions than that."""
    for block in (32, 64):
        if T <= block < widest.BLOCK_T:
            return replace(widest, BLOCK_T=block, num_warps=4)
    return widest


def distinct(verb: str, dtype: torch.dtype, arch: str) -> dict[Tile, tuple[int, int, int]]:
    """Every tile that `tile` can return for this verb, dtype and architecture, with a (T, D, P) it is for."""
    tiles = {}
    features = (4096, 64, 4095, 33)
    for T, D, P in product((1024, 48, 16), features, features):
        tiles.setdefault(tile(verb, T, D, P, dtype, arch), (T, D, P))
    return tiles


def splits(programs: int, steps: int, arch: str) -> int:
    """Into how many parts to split a reduction of `steps` steps done by `programs` independent programs.

    The smallest number that keeps at least 9 of 10 multiprocessors busy over the whole launch, or the
    best up to one wave (or four parts): every part costs a write and a read of the result. Each part keeps
    at least four steps.
    """
    width = _MULTIPROCESSORS[family(arch)]
    most = max(1, min(max(4, width // programs), steps // 4))
    best, best_share = 1, 0.0
    for count in range(1, most + 1):
        waves = -(-programs * count // width)
        share = programs * count / (waves * width)
        if share >= 0.9:
            return count
        if share > best_share:
            best, best_share = count, share
    return best
