"""Which way a norm goes, from T, D and P alone: pure arithmetic, never the number of samples, never a tensor's values.

| way      | extra FLOPs per sample | extra memory per sample     |
|----------|------------------------|-----------------------------|
| rank_one | 2(D + P)               | none                        |
| gram     | T(T + tile)(D + P)     | none                        |
| direct   | 2·T·D·P                | none                        |
| keep     | none, 8·D·P bytes read and written | 4·D·P bytes in the place of the inputs  |

A multiply-add counts as two FLOPs. ``gram`` counts the tiles of the lower triangle; those on the diagonal are computed
whole. On a CPU ``benchmarks/scaling.py`` finds the two ways equal near T = 128 for 256×256 and between 128 and 256 for
256×1024, where the counts are equal at 128 and 282 (for half a square: 256 and 410). Layers of 128×128 and less are too
small there for a count of FLOPs to tell.
"""

from __future__ import annotations

from typing import Literal

import torch

from dpfast.arithmetic import bounds, precision

Way = Literal["rank_one", "gram", "direct", "keep"]

KEEP_RATIO = 1.5
"""The memory budget of "keep": a sample's gradient is kept where it takes at most this many times the bytes of the
activations and backprops that would be kept in its place."""

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


def gram_slack(t: int, d: int, p: int) -> float:
    """The share of the norm that the Gram way's error bound takes on ordinary data (docs/bounds.md, "Size")."""
    terms = bounds.blocked_terms(d, bounds.DOT_BLOCK) + bounds.blocked_terms(p, bounds.DOT_BLOCK)
    return 0.5 * precision.unit_roundoff(torch.float32) * terms * (1.0 + t / max(1, min(d, p)) ** 0.5)


def norm_way(t: int, d: int, p: int) -> Literal["rank_one", "gram", "direct"]:
    """The cheapest way to take ‖G_n‖ without writing G_n."""
    if t <= 1:
        return "rank_one"
    if norm_flops("gram", t, d, p) < norm_flops("direct", t, d, p) and gram_slack(t, d, p) <= MAX_GRAM_SLACK:
        return "gram"
    return "direct"


def keeps(t: int, gradient_bytes: int, input_bytes: int) -> bool:
    """Whether to write G_n once, with its norm, and to read it for the clipped sum instead of a second GEMM.

    Args:
        gradient_bytes, input_bytes: of one sample; what is kept, and what it is kept in the place of.
    """
    return t > 1 and gradient_bytes <= KEEP_RATIO * input_bytes
