"""Per-sample gradients of a linear layer, with their norms, the bias's and what bounds their rounding in the same pass.

    G[n] = s Σ_t b[n, t] a[n, t]ᵀ     (P, D)
    g[n] = s Σ_t b[n, t]              (P,)
    S[n] = Σ_t ‖a[n, t]‖ ‖b[n, t]‖

Tiling: one program a tile of BLOCK_P × BLOCK_D of one sample's G, the tiles of a sample next to each other
so that its rows stay in the L2 cache. A program walks T in steps of BLOCK_T, each one `tl.dot`. With a bias,
BLOCK_P-wide column sums follow as further programs of the sample, so that no tile of G waits for them. So do the row
products of S, ROWS positions a program: in the tiles' programs every row would be squared once a tile, and on sm_90
fetched from shared memory for it; here it is read once more, while the sample's tiles keep it in the L2 cache.
Where a sample has few tiles and many positions, T is split into parts (`_tiles.split`): each part leaves its
tiles in a workspace, and `_partials.add_parts` adds them.
Order of addition: chains of `_tiles.CHAIN` positions, each in one fp32 accumulator (tensor cores cut off what
does not fit it, so its error grows with its length), chains in sequence into a second one, parts in sequence,
then one product with the scale s. Within a chain: BLOCK_T products at a time, in the hardware's order. A tile's
squares are summed over one dim, then over the other; tiles are summed in fp64 (`_partials`).
Reference: `einsum("ntp,ntd->npd", b, a)`. Source: Goodfellow, Efficient per-example gradient computations
(2015), written out instead of its norm alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import arch_of, launch, promote, validate, widens
from ._partials import add_parts, part_blocks, rounded_product, sum_partials, sum_tile
from ._repeat import empty, repeats
from ._rows import brought_to_step, column_sums, load_columns, load_rows, row_sources, run_of, sizes
from ._tiles import cdiv


@triton.jit
def outer_tile(
    b,  # (N, T, P), see `load_rows`
    a,  # (N, T, D)
    stride_bn,
    stride_bt,
    stride_an,
    stride_at,
    n,
    p,
    d,
    first_t,
    last_t,
    T,
    D,
    P,
    CHAIN: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The tile of G[n] at (p, d) over positions [first_t, last_t), in fp32, zero outside (P, D).

    CHAIN is 0 where there is only one chain; first_t is a multiple of it, and last_t one of BLOCK_T or T.
    """
    # Warpgroup MMA and tcgen05 take 64 rows at least and 8 columns: a thin P goes to the columns.
    THIN_P: tl.constexpr = BLOCK_P < 64 and BLOCK_P < BLOCK_D
    ROWS: tl.constexpr = BLOCK_D if THIN_P else BLOCK_P
    COLUMNS: tl.constexpr = BLOCK_P if THIN_P else BLOCK_D

    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in range(first_t, last_t, BLOCK_T):
        # G += bᵀ a, or its transpose
        if THIN_P:
            left = load_columns(a, stride_an, stride_at, n, t, d, T, D, TMA, BLOCK_T, BLOCK_D)
            right = load_rows(b, stride_bn, stride_bt, n, t, p, T, P, TMA, BLOCK_T, BLOCK_P)
        else:
            left = load_columns(b, stride_bn, stride_bt, n, t, p, T, P, TMA, BLOCK_T, BLOCK_P)
            right = load_rows(a, stride_an, stride_at, n, t, d, T, D, TMA, BLOCK_T, BLOCK_D)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        if CHAIN:  # noqa: SIM102 (one is known to the compiler, the other is not)
            if (t + BLOCK_T) % CHAIN == 0:
                total += acc
                acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if CHAIN:
        acc += total
    return tl.trans(acc) if THIN_P else acc


@triton.jit
def row_products(
    a,  # (N, T, D), see `load_rows`
    b,  # (N, T, P)
    stride_an,
    stride_at,
    stride_bn,
    stride_bt,
    n,
    t,
    T,
    D,
    P,
    lost_a,
    lost_b,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Σ ‖a[n, t]‖ ‖b[n, t]‖ over BLOCK_T positions."""
    sq_a = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for d in range(0, D, BLOCK_D):
        x = load_rows(a, stride_an, stride_at, n, t, d, T, D, TMA, BLOCK_T, BLOCK_D).to(tl.float32)
        sq_a += x * x
    sq_b = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for p in range(0, P, BLOCK_P):
        y = load_rows(b, stride_bn, stride_bt, n, t, p, T, P, TMA, BLOCK_T, BLOCK_P).to(tl.float32)
        sq_b += y * y
    norm_a = tl.sqrt(tl.sum(sq_a, axis=1) + lost_a)
    norms = rounded_product(norm_a, tl.sqrt(tl.sum(sq_b, axis=1) + lost_b))
    products = tl.where(t + tl.arange(0, BLOCK_T) < T, norms, 0.0)
    return tl.sum(products, axis=0)


@triton.jit(do_not_specialize=["T", "first_n", "parts", "part"])
def _outer_kernel(
    a,  # activations (N, T, D), see `load_rows`
    b,  # backprops (N, T, P)
    out_ptr,  # (N · parts, P, D)
    bias_ptr,  # (N · parts, P)
    partials_ptr,  # partial squared norms (N · parts, programs of a part but those of row products)
    products_ptr,  # partial sums of row products, of all samples (N · parts, cdiv(part, ROWS))
    runs_ptr,  # None, or which positions are whose (N, 2): see `_rows`
    stride_an,
    stride_at,
    stride_bn,
    stride_bt,
    T,
    D,
    P,
    first_n,
    parts,
    part,  # positions; where there are several, a multiple of CHAIN
    scale,
    lost_a,  # what squares of a row may lose to underflow: so no row norm comes out smaller, and no product underflows
    lost_b,
    WRITE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,  # row products of a program; 0: none
    STEP: tl.constexpr,  # rows are read to the next multiple of it
    CHAIN: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # locate
    tiles_d = tl.cdiv(D, BLOCK_D)
    tiles = tl.cdiv(P, BLOCK_P) * tiles_d
    slots = tiles  # of partial squared norms
    if BIAS:
        slots += tl.cdiv(P, BLOCK_P)
    programs = slots
    if ROWS:
        blocks = tl.cdiv(part, ROWS)
        programs += blocks
    pid = tl.program_id(0)
    row = pid // programs  # of the outputs
    pid_tile = pid % programs
    n = first_n + row // parts
    if runs_ptr is not None:
        first, T = run_of(runs_ptr, n)
        a += first * stride_at
        b += first * stride_bt
        n = 0
    first_t = row % parts * part
    last_t = tl.minimum(first_t + part, T)
    row = row.to(tl.int64)
    read_d = tl.cdiv(D, STEP) * STEP
    read_p = tl.cdiv(P, STEP) * STEP

    if pid_tile < tiles:
        p = pid_tile // tiles_d * BLOCK_P
        d = pid_tile % tiles_d * BLOCK_D
        # fmt: off
        acc = scale * outer_tile(
            b, a, stride_bn, stride_bt, stride_an, stride_at, n, p, d, first_t, last_t, T, read_d, read_p,
            CHAIN, TMA, WIDEN, BLOCK_T, BLOCK_D, BLOCK_P,
        )
        # fmt: on
        if WRITE:
            offs_p = p + tl.arange(0, BLOCK_P)
            offs_d = d + tl.arange(0, BLOCK_D)
            out_ptrs = out_ptr + row * P * D + offs_p.to(tl.int64)[:, None] * D + offs_d[None, :]
            mask = (offs_p < P)[:, None] & (offs_d < D)[None, :]
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
        if NORM:
            tl.store(partials_ptr + row * slots + pid_tile, sum_tile(rounded_product(acc, acc)))
    elif pid_tile >= slots:  # never where there are no row products
        if ROWS:
            block = pid_tile - slots
            # fmt: off
            products = row_products(
                a, b, stride_an, stride_at, stride_bn, stride_bt, n, first_t + block * ROWS, T, read_d, read_p,
                lost_a, lost_b, TMA, ROWS, BLOCK_D, BLOCK_P,
            )
            # fmt: on
            tl.store(products_ptr + (row + first_n * parts) * blocks + block, products)
    elif BIAS:
        p = (pid_tile - tiles) * BLOCK_P
        sums = scale * column_sums(b, stride_bn, stride_bt, n, p, first_t, last_t, T, read_p, TMA, BLOCK_T, BLOCK_P)
        if WRITE:
            offs_p = p + tl.arange(0, BLOCK_P)
            tl.store(bias_ptr + row * P + offs_p, sums.to(bias_ptr.dtype.element_ty), mask=offs_p < P)
        if NORM:
            tl.store(partials_ptr + row * slots + pid_tile, tl.sum(rounded_product(sums, sums), axis=0))


class OuterProductResult(NamedTuple):
    grad_sample: torch.Tensor | None
    bias_grad_sample: torch.Tensor | None
    sq_norm: torch.Tensor | None
    bias_sq_norm: torch.Tensor | None
    row_products: torch.Tensor | None


@repeats
def outer_product(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    *,
    bias: bool = False,
    norm: bool = False,
    row_products: bool = False,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
    tile: _tiles.Tile | None = None,
    runs: torch.Tensor | None = None,
    longest: int = 0,
    partials: bool = False,
) -> OuterProductResult:
    """Per-sample gradients of a linear layer.

    Maths: grad_sample[n] = s Σ_t b[n, t] a[n, t]ᵀ, bias_grad_sample[n] = s Σ_t b[n, t],
        row_products[n] = Σ_t ‖a[n, t]‖ ‖b[n, t]‖, without s.
    Args:
        activations: (N, T, D), bf16, fp16 or fp32, unit last stride.
        backprops: (N, T, P), likewise; a mixed pair is copied to fp32 first.
        bias: also return the bias's gradients.
        norm: also return squared norms, taken before rounding to `out_dtype`.
        row_products: also return these; a square that underflows makes none smaller.
        scale: s, applied to the fp32 sums; N where the loss was a mean over samples.
        tile: instead of the table's.
        runs, longest: N units of any number of positions instead, see `outer`.
        partials: see `outer`.
    Returns: grad_sample (N, P, D) and bias_grad_sample (N, P) in `out_dtype`, sq_norm, bias_sq_norm and row_products
        (N,) fp32; None where not asked for. All fresh.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: fp32 accumulation, one rounding to `out_dtype`; IEEE products of fp32.
    Cost: 2·N·T·D·P FLOPs; writes N·P·D. Where T is split, a workspace of at most `_tiles.WORKSPACE_BYTES`.
    Edge cases: N = 0 is empty; T = 0 gives zeros.
    """
    flags = (True, bias, norm, row_products)
    return outer("outer_product", activations, backprops, *flags, scale, out_dtype, tile, runs, longest, partials)


def outer(
    verb: str,
    activations: torch.Tensor,
    backprops: torch.Tensor,
    write: bool,
    bias: bool,
    norm: bool,
    row_products: bool,
    scale: float,
    out_dtype: torch.dtype,
    tile: _tiles.Tile | None,
    runs: torch.Tensor | None,
    longest: int,
    partials: bool = False,
) -> OuterProductResult:
    """`outer_product` with the tile of `verb`; without `write` no gradient is stored or returned.

    runs: (N, 2) int64, the first position of each unit and that behind its last, of one list of rows: activations (1,
        R, D), backprops (1, R, P). `longest` is the most positions that one has; units of one `_tiles.run_class` have
        the bits of samples with as many positions. No bias.
    partials: sq_norm and row_products are what the programs left, (N, ·), for `sum_partials` to add up together with
        that of other launches, to the same bits. No bias.
    """
    validate(activations, backprops)
    activations, backprops = promote(activations, backprops)
    N, T = sizes(activations, runs, longest)
    D, P = activations.shape[2], backprops.shape[2]
    if bias and (partials or runs is not None):
        raise ValueError("no bias of runs, where it is a sum of rows by unit, nor beside partials")
    device = activations.device
    if 0 in (N, T, D, P):
        # An empty sum, or nothing to sum into: D = 0 leaves the bias its value.
        sums = backprops.sum(1, dtype=torch.float32) * scale if bias else None
        return OuterProductResult(
            torch.zeros((N, P, D), dtype=out_dtype, device=device) if write else None,
            sums.to(out_dtype) if write and bias else None,
            torch.zeros((N, 1) if partials else N, dtype=torch.float32, device=device) if norm else None,
            sums.square().sum(1) if bias and norm else None,
            torch.zeros((N, 1) if partials else N, dtype=torch.float32, device=device) if row_products else None,
        )
    arch = arch_of(activations)
    if tile is None:
        tile = _tiles.tile(verb, T, D, P, activations.dtype, arch)
    parts, part = _tiles.split(tile, T, D, P, arch)
    tiles_p = cdiv(P, tile.BLOCK_P)
    tiles = tiles_p * cdiv(D, tile.BLOCK_D)
    slots = tiles + (tiles_p if bias else 0)
    # By sizes, not by strides: the order of addition is a sample's own. More rows that are loaded by element spill.
    octet = 16 // activations.element_size() if tile.TMA else 16
    step = _tiles.row_step(verb, T, D, P, activations.dtype)
    rows = tile.BLOCK_T
    if row_products and step == 1 and (D % octet or P % octet):
        rows, tile = 4, replace(tile, TMA=False)  # a single row of any size can be described, but in blocks of BLOCK_T
    if runs is not None:
        tile = replace(tile, TMA=False)
    activations, backprops = brought_to_step(tile, step, activations, backprops)
    a, b, described = row_sources(tile, (activations, tile.BLOCK_D), (backprops, tile.BLOCK_P))
    part = part if parts > 1 else T
    blocks = cdiv(part, rows)
    programs = slots + (blocks if row_products else 0)

    def start(first: int, count: int, out, bias_out, partials, scale: float) -> None:
        launch(
            _outer_kernel,
            count * parts * programs,
            tile,
            device,
            a=a,
            b=b,
            out_ptr=out,
            bias_ptr=bias_out,
            partials_ptr=partials,
            products_ptr=products,
            runs_ptr=runs,
            stride_an=activations.stride(0),
            stride_at=activations.stride(1),
            stride_bn=backprops.stride(0),
            stride_bt=backprops.stride(1),
            T=T,
            D=D,
            P=P,
            first_n=first,
            parts=parts,
            part=part,
            scale=scale,
            lost_a=D * 2.0**-126,
            lost_b=P * 2.0**-126,
            WRITE=out is not None,
            BIAS=bias,
            NORM=partials is not None,
            ROWS=rows if row_products else 0,
            STEP=step,
            CHAIN=_tiles.CHAIN if T > _tiles.CHAIN else 0,
            TMA=described,
            WIDEN=widens(_outer_kernel),
            BLOCK_T=tile.BLOCK_T,
            BLOCK_D=tile.BLOCK_D,
            BLOCK_P=tile.BLOCK_P,
        )

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return empty(shape, dtype, device)

    out = new(N, P, D, dtype=out_dtype) if write else None
    bias_out = new(N, P, dtype=out_dtype) if write and bias else None
    products = new(N, parts * blocks) if row_products else None
    if parts == 1:
        run = tiles
        squares = new(N, slots) if norm else None
        start(0, N, out, bias_out, squares, float(scale))
    else:
        run = part_blocks(P * D)
        squares = new(N, run + (part_blocks(P) if bias else 0)) if norm else None
        group = min(N, max(1, _tiles.WORKSPACE_BYTES // (4 * parts * P * (D + bias))))
        workspace = new(group * parts, P, D)
        bias_workspace = new(group * parts, P) if bias else None
        for first in range(0, N, group):
            count = min(group, N - first)
            start(first, count, workspace, bias_workspace, None, 1.0)
            add_parts(workspace, parts, scale, out, squares, first, count, 0)
            if bias:
                add_parts(bias_workspace, parts, scale, bias_out, squares, first, count, run)
    if partials:
        return OuterProductResult(out, None, squares, None, products)
    norms = sum_partials(squares, run) if norm else (None,)
    summed = None if products is None else sum_partials(products, parts * blocks)[0]
    return OuterProductResult(out, bias_out, norms[0], norms[1] if bias and norm else None, summed)
