"""Direct norms of many thin factors of one shape in one launch, each input read once.

    G[g, n]   = Σ_t b[g, n, t] a[g, n, t]ᵀ                       (P, D), written only where asked for
    q[g, n]   = ‖G[g, n]‖²
    s²[g, n]  = Σ_tile (Σ_t ‖a[g, n, t, tile]‖ ‖b[g, n, t, tile]‖)²

Thin: one of D and P is small, as in LoRA. The kernel calls the wide operand x and the thin one y and takes xᵀy, whose
norm is G's: the wide dimension stands where the tensor cores have at least 64 rows, the thin one where they have 8.
Tiling: one program a tile of BLOCK_X × BLOCK_Y of one sample of one factor. BLOCK_Y covers the thin dimension, so x is
read once, by one program; y is read once from memory and again from the L2 cache. The tiles' own row norms, taken from
the same loads, give s, which bounds the rounding of G (docs/bounds.md) and never exceeds Σ_t ‖a_t‖‖b_t‖.
Order of addition: BLOCK_T positions in one `tl.dot` in the hardware's order, then T / BLOCK_T rounded sums in sequence.
A tile's squares are summed over its columns, then its rows; tiles in fp64 (`_partials`). Neither order nor tile depends
on N or on the group.
The factors' addresses travel as kernel arguments: no table is copied to the device, so a launch can be captured.
Reference: `einsum("ntp,ntd->npd", b, a)` of each factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._launch import arch_of, launch, promote, validate, widens
from ._partials import rounded_product, sum_partials, sum_tile
from ._rows import run_of, sizes
from ._tiles import Tile, cdiv, family, next_power_of_2

THINNEST = 64
"""The most entries of the thin dimension."""

_LONGEST_WALK = 2048  # positions for each tile of the wide dimension; beyond, `outer_norm` splits T better


@triton.jit(do_not_specialize=["N", "T"])
def _grouped_norm_kernel(
    x_ptrs,  # tuple: one address a factor
    y_ptrs,
    out_ptr,
    partials_ptr,
    runs_ptr,  # None, or which positions are whose (N, 2): see `_rows`
    stride_xn,  # wide operand (N, T, X)
    stride_xt,
    stride_yn,  # thin operand (N, T, Y)
    stride_yt,
    stride_on,  # gradients (factors · N, X, Y), in whichever order they lie
    stride_ox,
    stride_oy,
    N,
    T,
    X,
    Y,
    KEEP: tl.constexpr,
    OCTETS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):
    if OCTETS:
        # Sizes and strides are multiples of 8, says the host; the compiler asks only about 16, and rank 8 is common.
        X = X // 8 * 8
        Y = Y // 8 * 8
        stride_xn = stride_xn // 8 * 8
        stride_xt = stride_xt // 8 * 8
        stride_yn = stride_yn // 8 * 8
        stride_yt = stride_yt // 8 * 8

    # locate
    tiles = tl.cdiv(X, BLOCK_X)
    pid = tl.program_id(0)
    pid_tile = pid % tiles
    pid_gn = pid // tiles
    pid_g = pid_gn // N
    pid_n = (pid_gn % N).to(tl.int64)
    x_ptr = x_ptrs[0]
    y_ptr = y_ptrs[0]
    for i in tl.static_range(1, len(x_ptrs)):
        x_ptr = tl.where(pid_g == i, x_ptrs[i], x_ptr)
        y_ptr = tl.where(pid_g == i, y_ptrs[i], y_ptr)

    if runs_ptr is not None:
        first, T = run_of(runs_ptr, pid_n)
        x_ptr += first * stride_xt
        y_ptr += first * stride_yt
        pid_n = 0
    offs_t = tl.arange(0, BLOCK_T).to(tl.int64)
    offs_x = pid_tile.to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    offs_y = tl.arange(0, BLOCK_Y)
    mask_x = offs_x < X
    mask_y = offs_y < Y
    x_block = x_ptr + pid_n * stride_xn + offs_t[:, None] * stride_xt + offs_x[None, :]
    y_block = y_ptr + pid_n * stride_yn + offs_t[:, None] * stride_yt + offs_y[None, :]
    block = tl.full((), BLOCK_T, tl.int64)
    # What squares may lose to underflow, so that no row norm comes out too small.
    lost_x: tl.constexpr = BLOCK_X * 2.0**-126
    lost_y: tl.constexpr = BLOCK_Y * 2.0**-126

    total = tl.zeros((BLOCK_X, BLOCK_Y), tl.float32)
    products = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, T, BLOCK_T):
        mask_t = offs_t < T - start
        x = tl.load(x_block, mask=mask_t[:, None] & mask_x[None, :], other=0.0)  # (BLOCK_T, BLOCK_X)
        y = tl.load(y_block, mask=mask_t[:, None] & mask_y[None, :], other=0.0)  # (BLOCK_T, BLOCK_Y)
        x_wide = x.to(tl.float32)
        y_wide = y.to(tl.float32)
        if WIDEN:
            x = x_wide
            y = y_wide
        part = tl.dot(tl.trans(x), y, input_precision="ieee")
        # Not `total += part`, which the compiler makes one chain in the tensor core, where sums are cut off.
        total = tl.fma(part, 1.0, total)
        norm_x = tl.sqrt(tl.sum(rounded_product(x_wide, x_wide), axis=1) + lost_x)
        norm_y = tl.sqrt(tl.sum(rounded_product(y_wide, y_wide), axis=1) + lost_y)
        products += norm_x * norm_y
        x_block += block * stride_xt
        y_block += block * stride_yt

    if KEEP:
        places = offs_x[:, None] * stride_ox + offs_y[None, :].to(tl.int64) * stride_oy
        out_block = out_ptr + pid_gn.to(tl.int64) * stride_on + places
        tl.store(out_block, total, mask=mask_x[:, None] & mask_y[None, :])
    partial_ptr = partials_ptr + pid_gn.to(tl.int64) * (2 * tiles) + pid_tile
    tl.store(partial_ptr, sum_tile(rounded_product(total, total)))
    product = tl.sum(products, axis=0)
    tl.store(partial_ptr + tiles, product * product)


class GroupedNormResult(NamedTuple):
    """(G, N) fp32 each; ``grad_sample`` (G, N, P, D) fp32 or None. ``chain`` positions are added by one dot, then the
    sums of ``cdiv(T, chain)`` dots; each of ``tiles`` squares in ``sq_products`` may have been lost to underflow."""

    sq_norm: torch.Tensor
    sq_products: torch.Tensor
    grad_sample: torch.Tensor | None
    chain: int
    tiles: int


def groups(T: int, D: int, P: int) -> bool:
    """Whether factors of this shape are for this kernel: thin, and not walked by too few programs for too long."""
    wide, thin = max(D, P), min(D, P)
    return 0 < thin <= THINNEST and 0 < T <= _LONGEST_WALK * cdiv(wide, 128)


def largest_group(arch: str) -> int:
    """How many factors one launch takes: as many pairs of addresses as fit the scalar registers (static analysis)."""
    return 16 if arch.startswith("gfx") else 32


def thin_tile(D: int, P: int, dtype: torch.dtype, arch: str) -> Tile:
    """BLOCK_D blocks the wide dimension, BLOCK_P covers the thin one."""
    wide, thin = max(D, P), max(16, next_power_of_2(min(D, P)))
    by_element = D % 8 != 0 or P % 8 != 0
    if arch == "interpreter":
        return Tile(16, 64, thin, 0, 4, 1, "interpreter")
    if dtype == torch.float32:
        warps = 8 if by_element else 4
        stages = 2 if family(arch) == "sm_100" and not by_element else 3  # a third spills there
        return Tile(16, 64, thin, 0, warps, stages, "from static analysis: IEEE multiply-adds, no spill")
    if by_element:
        return Tile(32, 64, thin, 0, 4, 3, "from static analysis: loads of one element, no spill")
    stages = 2 if family(arch) == "gfx942" else 4
    block = 64 if wide <= 64 else 128
    return Tile(64, block, thin, 0, 4, stages, "from static analysis: 16-byte loads, two or more programs fit")


def grouped_outer_norm(
    activations: Sequence[torch.Tensor],
    backprops: Sequence[torch.Tensor],
    *,
    keep: bool = False,
    tile: Tile | None = None,
    runs: torch.Tensor | None = None,
    longest: int = 0,
) -> GroupedNormResult:
    """Squared norms of the per-sample gradients of G thin linear layers, with what bounds their error.

    Maths: q[g, n] = ‖Σ_t b[g][n, t] a[g][n, t]ᵀ‖², and s² as above.
    Args:
        activations: G of (N, T, D), bf16, fp16 or fp32, unit last stride; one shape, dtype and strides.
        backprops: G of (N, T, P), likewise; mixed pairs are copied to fp32 first.
        keep: also return the gradients.
        tile: instead of the shape's own; BLOCK_P must cover the smaller of D and P.
        runs, longest: N units of any number of positions instead, of lists of rows (1, R, ·), as in `outer`.
    Returns: fresh tensors.
    Raises: ValueError where dtype, shape or layout is none of the above, or differs within the group.
    Numerics: as `outer_norm`; s is at most 1.01 times too small.
    Cost: 2·G·N·T·D·P FLOPs; each input is read once from memory. cdiv(G, 32) launches (16 on AMD), and one for the
        sums over tiles.
    Edge cases: G = 0, N = 0 are empty; T, D or P = 0 gives zeros.
    """
    if len(activations) != len(backprops) or not activations:
        raise ValueError(f"{len(activations)} activations and {len(backprops)} backprops are no group of pairs")
    pairs = [promote(a, b) for a, b in zip(activations, backprops, strict=True)]
    for a, b in pairs:
        validate(a, b)
        for x, like in zip((a, b), pairs[0], strict=True):
            if (x.shape, x.stride(), x.dtype, x.device) != (like.shape, like.stride(), like.dtype, like.device):
                raise ValueError("the factors of a group have one shape, one dtype, one layout and one device")
    a, b = pairs[0]
    N, T = sizes(a, runs, longest)
    D, P, device = a.shape[2], b.shape[2], a.device
    G = len(pairs)
    out = torch.empty((G, N, P, D), dtype=torch.float32, device=device) if keep else None
    if 0 in (N, T, D, P):
        zeros = torch.zeros((G, N), dtype=torch.float32, device=device)
        return GroupedNormResult(zeros, zeros.clone(), None if out is None else out.zero_(), 1, 0)
    if tile is None:
        tile = thin_tile(D, P, a.dtype, arch_of(a))
    if min(D, P) > tile.BLOCK_P:
        raise ValueError(f"BLOCK_P = {tile.BLOCK_P} does not cover min(D, P) = {min(D, P)}")
    wide, thin = (0, 1) if D >= P else (1, 0)
    x, y = pairs[0][wide], pairs[0][thin]
    octets = not any(size % 8 for size in (D, P, *x.stride()[:2], *y.stride()[:2]))
    tiles = cdiv(x.shape[2], tile.BLOCK_D)
    partials = torch.empty((G * N, 2 * tiles), dtype=torch.float32, device=device)
    largest = largest_group(arch_of(a))
    for first in range(0, G, largest):
        members = pairs[first : first + largest]
        # One length of tuple, and so one compiled kernel, for all groups; the last addresses are not used.
        padded = members if len(members) == 1 else members + [members[0]] * (largest - len(members))
        launch(
            _grouped_norm_kernel,
            len(members) * N * tiles,
            tile,
            device,
            x_ptrs=tuple(pair[wide] for pair in padded),
            y_ptrs=tuple(pair[thin] for pair in padded),
            out_ptr=None if out is None else out[first],
            partials_ptr=partials[first * N],
            runs_ptr=runs,
            stride_xn=x.stride(0),
            stride_xt=x.stride(1),
            stride_yn=y.stride(0),
            stride_yt=y.stride(1),
            stride_on=P * D,
            stride_ox=1 if wide == 0 else D,
            stride_oy=D if wide == 0 else 1,
            N=N,
            T=T,
            X=x.shape[2],
            Y=y.shape[2],
            KEEP=keep,
            OCTETS=octets,
            WIDEN=widens(_grouped_norm_kernel),
            BLOCK_T=tile.BLOCK_T,
            BLOCK_X=tile.BLOCK_D,
            BLOCK_Y=tile.BLOCK_P,
        )
    sq_norm, sq_products = (x.view(G, N) for x in sum_partials(partials, tiles))
    return GroupedNormResult(sq_norm, sq_products, out, tile.BLOCK_T, tiles)
