"""Direct norm: squared norms of per-sample gradients that are never written.

    ‖G[n]‖² = ‖Σ_t b[n, t] a[n, t]ᵀ‖²
    ‖g[n]‖² = ‖Σ_t b[n, t]‖²

Kernel, tiling and order of addition: those of `outer_product`, which squares a tile while it is in registers;
here it is not stored, and one fp32 a tile is written. Only the parts of a T that is split pass through memory.
Reference: `einsum("ntp,ntd->npd", b, a).square().sum((1, 2))`. Source: Li et al., Large language models can
be strong differentially private learners (2022), §4, for when T is long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _tiles
from ._repeat import repeats
from .outer_product import outer


class OuterNormResult(NamedTuple):
    sq_norm: torch.Tensor
    bias_sq_norm: torch.Tensor | None
    row_products: torch.Tensor | None


@repeats
def outer_norm(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    *,
    bias: bool = False,
    row_products: bool = False,
    tile: _tiles.Tile | None = None,
    runs: torch.Tensor | None = None,
    longest: int = 0,
    partials: bool = False,
) -> OuterNormResult:
    """Squared norms of a linear layer's per-sample gradients, taken directly.

    Maths: sq_norm[n] = ‖Σ_t b[n, t] a[n, t]ᵀ‖², bias_sq_norm[n] = ‖Σ_t b[n, t]‖².
    Args:
        activations: (N, T, D), bf16, fp16 or fp32, unit last stride.
        backprops: (N, T, P), likewise; a mixed pair is copied to fp32 first.
        bias: also return the bias's.
        row_products: also return Σ_t ‖a[n, t]‖ ‖b[n, t]‖, which bounds their rounding; a square that underflows makes
            none smaller.
        tile: instead of the table's.
        runs, longest: N units of any number of positions instead, see `outer`.
        partials: likewise.
    Returns: (N,) fp32 each, fresh; None where not asked for.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: the gradient in fp32, its squares in fp32 within a tile, tiles in fp64.
    Cost: 2·N·T·D·P FLOPs; workspace 4 bytes a tile and sample, and at most `_tiles.WORKSPACE_BYTES` where T is
        split.
    Edge cases: N = 0 is empty; T = 0 gives zeros.
    """
    flags = (False, bias, True, row_products)
    result = outer("outer_norm", activations, backprops, *flags, 1.0, torch.float32, tile, runs, longest, partials)
    return OuterNormResult(result.sq_norm, result.bias_sq_norm, result.row_products)
