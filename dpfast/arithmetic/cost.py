"""Which way a norm goes, from T, D, P and the machine: pure arithmetic, never the number of samples, never a tensor's
values.

| way      | extra FLOPs per sample | extra memory per sample     |
|----------|------------------------|-----------------------------|
| rank_one | 2(D + P)               | none                        |
| gram     | T(T + tile)(D + P)     | none                        |
| direct   | 2·T·D·P                | none                        |
| keep     | none, 8·D·P bytes read and written | 4·D·P bytes in the place of the inputs  |
| in turn  | none, 8·D·P bytes read and written | none; 4·D·P bytes of one sample         |

A multiply-add counts as two FLOPs. ``gram`` counts the tiles of the lower triangle; those on the diagonal are computed
whole. On a CPU a FLOP of ``gram`` takes somewhat longer, by how much its instructions tell (:data:`GRAM_FLOP`). Layers
of 128×128 and less are too small there for a count of FLOPs to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from dpfast.arithmetic import bounds, precision, products

Way = Literal["rank_one", "gram", "direct", "keep"]

KEEP_RATIO = 1.5
"""The memory budget of "keep": a sample's gradient is kept where it takes at most this many times the bytes of the
activations and backprops that would be kept in its place."""

GRAM_FLOP = {"MKL AVX-512": 1.3, "MKL AVX2": 1.2, "oneDNN AVX-512": 1.1}
"""What a FLOP of the Gram norm takes on a CPU beside one of the direct norm, by ``products.multiplier()``: medians of
the rows of ``benchmarks/scaling.py norms`` (results/norms.jsonl; on an Intel CPU, the last two imitated there). Of
other instructions there is no row, and FLOPs are counted as they are."""

SMALL_GRADIENT = 2**13
"""Bytes of a sample's gradient up to which the reference takes the direct way: the Gram way is several times as many
calls, and here these take the time, not the products."""

_GRAM_FLOP_HERE = GRAM_FLOP.get(products.multiplier(), 1.0)  # asked once: torch.compile cannot follow the question

MAX_GRAM_SLACK = 1e-3
"""The Gram way is left where its error bound would, on ordinary data, exceed this share of the norm."""


def norm_flops(way: Way, t: int, d: int, p: int) -> int:
    """Extra FLOPs that the norm of one sample costs."""
    if way == "rank_one":
        return 2 * (d + p)
    if way == "gram":
        return t * (t + min(t, bounds.GRAM_TILE)) * (d + p)
    if way == "direct":
        return 2 * t * d * p
    return 2 * d * p


def gram_positions(t: int) -> int:
    """How many positions the reference's Gram way has for T: rows of zeros up to there change no bit of value and
    bound."""
    return -(-t // products.BATCH_INVARIANT_FROM) * products.BATCH_INVARIANT_FROM


def gram_slack(t: int, d: int, p: int) -> float:
    """The share of the norm that the Gram way's error bound takes on ordinary data (docs/bounds.md, "Size")."""
    terms = bounds.blocked_terms(d, bounds.DOT_BLOCK) + bounds.blocked_terms(p, bounds.DOT_BLOCK)
    return 0.5 * precision.unit_roundoff(torch.float32) * terms * (1.0 + t / max(1, min(d, p)) ** 0.5)


def norm_way(t: int, d: int, p: int, device: torch.device | None = None) -> Literal["rank_one", "gram", "direct"]:
    """The cheapest way to take ‖G_n‖ without writing G_n; ``device``: the reference's, None: kernels. On a CPU
    :data:`GRAM_FLOP` weighs the counts, and the Gram way has some positions more."""
    if t <= 1:
        return "rank_one"
    direct = norm_flops("direct", t, d, p)
    if device is not None and device.type == "cpu":
        gram = _GRAM_FLOP_HERE * norm_flops("gram", gram_positions(t), d, p)
    else:
        gram = norm_flops("gram", t, d, p)
    if gram < direct and gram_slack(t, d, p) <= MAX_GRAM_SLACK:
        return "gram"
    return "direct"


def norm_report() -> str:
    """How the Gram way and the direct one are weighed on this CPU."""
    who = products.multiplier()
    if who in GRAM_FLOP:
        return f"a FLOP of the Gram way counts {GRAM_FLOP[who]} of the direct way's, as measured with {who}"
    return f"by their FLOPs alone: nothing is measured with {who} instructions"


def keeps(t: int, gradient_bytes: int, input_bytes: int, ratio: float | None = None) -> bool:
    """Whether to write G_n once, with its norm, and to read it for the clipped sum instead of a second GEMM.

    Args:
        gradient_bytes, input_bytes: of one sample; what is kept, and what it is kept in the place of.
        ratio: of this factor, where a plan for all of them has one (``modes/memory_budget.py``); :data:`KEEP_RATIO`.
    """
    return t > 1 and gradient_bytes <= (KEEP_RATIO if ratio is None else ratio) * input_bytes


IN_TURN = 32 * 2**20
"""Bytes of one sample's gradients that are written at a time at most, of all layers that are taken in turn. More do not
stay in the caches, and then it gains nothing."""

IN_TURN_SAVES = 2**21, 2**23
"""FLOPs that it must save a sample, in each layer and in all: what its calls take (``benchmarks/scaling.py turns``,
results/turns.jsonl)."""

IN_TURN_CACHED = 2 * 2**20, 16
"""Bytes of a gradient that a core's own cache holds, and the FLOPs more that each byte of a larger one takes."""

FLOPS_A_BYTE = {"cpu": 4, "cuda": 150}
"""What a device multiplies and adds while it moves a byte, about (``python -m dpfast bench`` measures both rates). It
only orders plans."""


class Size(NamedTuple):
    """Of one factor, a sample: positions, FLOPs of its norm, bytes of its gradient and of the inputs."""

    t: int
    flops: int
    gradient: int
    inputs: int
    device: str

    @property
    def saves(self) -> float:
        """FLOPs that a written gradient saves: the norm, less its being written and read once more."""
        return self.flops - FLOPS_A_BYTE.get(self.device, 4) * 2 * self.gradient if self.t > 1 else 0.0

    @property
    def saves_in_turn(self) -> float:
        """The same where it is taken in turn."""
        cached, flops = IN_TURN_CACHED
        return self.saves - (flops * self.gradient if self.gradient > cached else 0)


def may_save_in_turn(size: Size) -> bool:
    """Whether a factor on a CPU saves enough to be taken in turn, in some company."""
    return size.saves_in_turn >= IN_TURN_SAVES[0]


def waits(size: Size) -> bool:
    """Whether a factor on a CPU that would be kept waits for its turn, as its inputs: they are less."""
    return size.gradient > size.inputs and may_save_in_turn(size)


def in_turn(sizes: Sequence[Size]) -> list[bool]:
    """Which factors are taken in turn: sample by sample, written once, for norm and clipped sum together, in the place
    of a norm without the gradient and a product for the sum. Those that save most for their bytes come first."""
    chosen, held, saved = [False] * len(sizes), 0, 0.0
    _, all_together = IN_TURN_SAVES
    saving = [i for i, size in enumerate(sizes) if may_save_in_turn(size)]
    for i in sorted(saving, key=lambda i: (-sizes[i].saves_in_turn / sizes[i].gradient, i)):
        chosen[i] = held + sizes[i].gradient <= IN_TURN
        held += chosen[i] * sizes[i].gradient
        saved += chosen[i] * sizes[i].saves_in_turn
    return chosen if saved >= all_together else [False] * len(sizes)
