"""Gram norm: squared norms of per-sample gradients from the inner products of rows.

    ‖G[n]‖² = Σ_tt' (a_t·a_t')(b_t·b_t')
    ‖g[n]‖² = Σ_tt'  b_t·b_t'
    e1 = Σ_tt' ‖a_t‖‖a_t'‖·|b_t·b_t'|
    e2 = Σ_tt' |a_t·a_t'|·‖b_t‖‖b_t'‖
    e3 = Σ_tt' |a_t·a_t'||b_t·b_t'|

Tiling: one program a pair of position blocks (i, j), i >= j, of one sample; the T × T matrices exist only
as such tiles in registers. Pairs off the diagonal count twice.
Order of addition: every inner product in chains of `_tiles.CHAIN` features, each in one fp32 accumulator handed
to `tl.dot` as its third operand, `acc = dot(x_i, x_jᵀ, acc)`, chains in sequence into a second one; within a
chain BLOCK_K products at a time, in the hardware's order. The epilogue multiplies elementwise in fp32, sums a
tile over j, then over i, doubles where i > j (exact), and pairs are summed in fp64 (`_partials`).
Reference: `(einsum("ntd,nsd->nts", a, a) * einsum("ntp,nsp->nts", b, b)).sum((1, 2))`. Source: Li et al.,
Large language models can be strong differentially private learners (2022), §4; e1 to e3 carry an
a-posteriori bound of this kernel's rounding errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import arch_of, launch, validate, widens
from ._partials import rounded_product, sum_partials, sum_tile
from ._repeat import empty, repeats
from ._rows import brought_to_step, lengthened, load_columns, load_rows, row_sources, run_of, sizes
from ._tiles import cdiv


@triton.jit
def _gram_tile(
    x,  # (N, T, K), see `load_rows`; (N, K, T) where TURNED
    stride_xn,
    stride_xt,  # of the second dim
    n,
    i,
    j,
    T,
    K,
    CHAIN: tl.constexpr,
    TURNED: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x[n, i : i + BLOCK_T] x[n, j : j + BLOCK_T]ᵀ in fp32, zero outside T. CHAIN is 0 where one is enough."""
    acc = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    total = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for k in range(0, K, BLOCK_K):
        if TURNED:
            x_i = load_columns(x, stride_xn, stride_xt, n, k, i, K, T, TMA, BLOCK_K, BLOCK_T)
            x_j = load_rows(x, stride_xn, stride_xt, n, k, j, K, T, TMA, BLOCK_K, BLOCK_T)
        else:
            x_i = load_rows(x, stride_xn, stride_xt, n, i, k, T, K, TMA, BLOCK_T, BLOCK_K)
            x_j = tl.trans(load_rows(x, stride_xn, stride_xt, n, j, k, T, K, TMA, BLOCK_T, BLOCK_K))
        if WIDEN:
            x_i = x_i.to(tl.float32)
            x_j = x_j.to(tl.float32)
        # X Xᵀ += x_i x_jᵀ
        acc = tl.dot(x_i, x_j, acc, input_precision="ieee")
        if CHAIN:  # noqa: SIM102 (see `outer_tile`)
            if (k + BLOCK_K) % CHAIN == 0:
                total += acc
                acc = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    if CHAIN:
        acc += total
    return acc


@triton.jit
def _weighted_sum_tile(tile, r_i, r_j):
    """Σ_ij tile_ij r_i r_j; the rows keep their second dim for the reason `sum_tile` gives."""
    rows = tl.sum(rounded_product(tile, r_j[None, :]), axis=1, keep_dims=True)
    return tl.sum(rounded_product(rows, r_i[:, None]))


@triton.jit(do_not_specialize=["T"])
def _gram_norm_kernel(
    a,  # activations (N, T, D), see `load_rows`
    b,  # backprops (N, T, P)
    row_norm_a_ptr,
    row_norm_b_ptr,
    partials_ptr,
    runs_ptr,  # None, or which positions are whose (N, 2): see `_rows`; then T is the longest run's
    stride_an,
    stride_at,
    stride_bn,
    stride_bt,
    stride_ran,  # row norms of activations (N, T)
    stride_rat,
    stride_rbn,  # row norms of backprops (N, T)
    stride_rbt,
    stride_sn,  # partial sums (N, outputs · pairs)
    T,
    D,
    P,
    BIAS: tl.constexpr,
    BOUND: tl.constexpr,
    CHAIN: tl.constexpr,
    TURNED: tl.constexpr,
    ROW_STEP: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # locate: the pair's number is i (i + 1) / 2 + j, 0 <= j <= i. The root may be one off either way.
    tiles = tl.cdiv(T, BLOCK_T)
    pairs = tiles * (tiles + 1) // 2
    pid = tl.program_id(0)
    n = pid // pairs
    pid_n = n.to(tl.int64)
    pair = pid % pairs
    pid_i = ((tl.sqrt((8 * pair + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    pid_i = tl.where(pid_i * (pid_i + 1) // 2 > pair, pid_i - 1, pid_i)
    pid_i = tl.where((pid_i + 1) * (pid_i + 2) // 2 <= pair, pid_i + 1, pid_i)
    pid_j = pair - pid_i * (pid_i + 1) // 2
    offs_i = pid_i.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_j = pid_j.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    partials_ptr += pid_n * stride_sn + pair
    count = tl.where(pid_i == pid_j, 1.0, 2.0)

    i = pid_i * BLOCK_T
    j = pid_j * BLOCK_T
    if runs_ptr is not None:
        first, T = run_of(runs_ptr, n)
        a += first * (1 if TURNED else stride_at)
        b += first * (1 if TURNED else stride_bt)
        if BOUND:
            row_norm_a_ptr += first * stride_rat
            row_norm_b_ptr += first * stride_rbt
        n = 0
        pid_n = 0
        D = tl.where(i < T, D, 0)  # a shorter run has fewer pairs: of the others nothing is read, and zeros are left
        P = tl.where(i < T, P, 0)
    read_t = T  # a copy's rows end in zeros, so that of samples loads take 16 bytes
    if TURNED and runs_ptr is None:
        read_t = tl.cdiv(T, ROW_STEP) * ROW_STEP
    gram_b = _gram_tile(b, stride_bn, stride_bt, n, i, j, read_t, P, CHAIN, TURNED, TMA, WIDEN, BLOCK_T, BLOCK_K)
    gram_a = _gram_tile(a, stride_an, stride_at, n, i, j, read_t, D, CHAIN, TURNED, TMA, WIDEN, BLOCK_T, BLOCK_K)

    tl.store(partials_ptr, count * sum_tile(rounded_product(gram_a, gram_b)))
    if BIAS:
        partials_ptr += pairs
        tl.store(partials_ptr, count * sum_tile(gram_b))
    if BOUND:
        mask_i = offs_i < T
        mask_j = offs_j < T
        # All four before the first sum: loaded where they are used, the 128-tile spills on sm_90 and sm_100.
        row_norm_a_ptr += pid_n * stride_ran
        row_norm_b_ptr += pid_n * stride_rbn
        ra_i = tl.load(row_norm_a_ptr + offs_i * stride_rat, mask=mask_i, other=0.0)  # (BLOCK_T,)
        ra_j = tl.load(row_norm_a_ptr + offs_j * stride_rat, mask=mask_j, other=0.0)
        rb_i = tl.load(row_norm_b_ptr + offs_i * stride_rbt, mask=mask_i, other=0.0)
        rb_j = tl.load(row_norm_b_ptr + offs_j * stride_rbt, mask=mask_j, other=0.0)
        gram_a = tl.abs(gram_a)
        gram_b = tl.abs(gram_b)
        partials_ptr += pairs
        tl.store(partials_ptr, count * _weighted_sum_tile(gram_b, ra_i, ra_j))
        partials_ptr += pairs
        tl.store(partials_ptr, count * _weighted_sum_tile(gram_a, rb_i, rb_j))
        partials_ptr += pairs
        tl.store(partials_ptr, count * sum_tile(rounded_product(gram_a, gram_b)))


class GramNormResult(NamedTuple):
    sq_norm: torch.Tensor
    bias_sq_norm: torch.Tensor | None
    bound_activations: torch.Tensor | None
    bound_backprops: torch.Tensor | None
    bound_product: torch.Tensor | None


def gram_norm(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    *,
    row_norm_activations: torch.Tensor | None = None,
    row_norm_backprops: torch.Tensor | None = None,
    bias: bool = False,
    tile: _tiles.Tile | None = None,
    runs: torch.Tensor | None = None,
    longest: int = 0,
) -> GramNormResult:
    """Squared norms of a linear layer's per-sample gradients, from the Gram matrices of its rows.

    Maths: sq_norm[n] = Σ_tt' (a_t·a_t')(b_t·b_t'), bias_sq_norm[n] = Σ_tt' b_t·b_t'. Given both row norms,
        bound_activations, bound_backprops and bound_product are e1, e2 and e3 of this module's docstring.
    Args:
        activations: (N, T, D), bf16, fp16 or fp32, unit last stride.
        backprops: (N, T, P), likewise.
        row_norm_activations, row_norm_backprops: (N, T) fp32, ‖a_t‖ and ‖b_t‖, any strides; both
            or neither.
        bias: also return the bias's.
        tile: instead of the table's.
        runs, longest: N units of any number of positions instead, of one list of rows (1, R, ·), as in `outer`.
    Returns: (N,) fp32 each, fresh; None where not asked for.
    Raises: ValueError where dtype, shape or layout is none of the above.
    Numerics: sums of both signs cancel, so a squared norm may come out too small or below zero; the error
        bound says by how much.
    Cost: N·T²·(D + P) FLOPs (half the matrix); workspace 4 bytes a pair of blocks, sample and output.
    Edge cases: N = 0 is empty; T = 0 gives zeros.
    """
    partials = gram_partials(
        activations,
        backprops,
        row_norm_activations=row_norm_activations,
        row_norm_backprops=row_norm_backprops,
        bias=bias,
        tile=tile,
        runs=runs,
        longest=longest,
    )
    bound = row_norm_activations is not None
    left = iter(sum_partials(partials.flatten(1), partials.shape[2]))
    return GramNormResult(
        sq_norm=next(left),
        bias_sq_norm=next(left) if bias else None,
        bound_activations=next(left) if bound else None,
        bound_backprops=next(left) if bound else None,
        bound_product=next(left) if bound else None,
    )


@repeats
def gram_partials(
    activations: torch.Tensor,
    backprops: torch.Tensor,
    *,
    row_norm_activations: torch.Tensor | None = None,
    row_norm_backprops: torch.Tensor | None = None,
    bias: bool = False,
    tile: _tiles.Tile | None = None,
    runs: torch.Tensor | None = None,
    longest: int = 0,
) -> torch.Tensor:
    """What the programs of a :func:`gram_norm` leave, (N, outputs, ·) fp32, outputs in the order of its result, for
    `sum_partials` to add up together with that of other launches, to the same bits."""
    validate(activations, backprops)
    N, T = sizes(activations, runs, longest)
    D, P = activations.shape[2], backprops.shape[2]
    bound = row_norm_activations is not None
    if bound != (row_norm_backprops is not None):
        raise ValueError("give the row norms of both or of neither")
    for row_norm in (row_norm_activations, row_norm_backprops):
        if bound and (row_norm.shape != activations.shape[:2] or row_norm.dtype != torch.float32):
            raise ValueError(f"row norms are (N, T) float32, not {tuple(row_norm.shape)} {row_norm.dtype}")
    outputs = 1 + bias + 3 * bound
    device = activations.device
    if N == 0 or T == 0:
        return torch.zeros((N, outputs, 1), dtype=torch.float32, device=device)
    # Each dot takes two tiles of one tensor, so a mixed pair needs no conversion, only room.
    dtype = torch.promote_types(activations.dtype, backprops.dtype)
    if tile is None:
        tile = _tiles.tile("gram_norm", T, D, P, dtype, arch_of(activations))
    tiles = cdiv(T, tile.BLOCK_T)
    pairs = tiles * (tiles + 1) // 2
    if runs is not None:
        tile = replace(tile, TMA=False)
    # Zeros behind a row change none of its products, so these are the rows from here on.
    step = _tiles.row_step("gram_norm", T, D, P, dtype)
    activations, backprops = brought_to_step(tile, step, activations, backprops)
    D, P = activations.shape[2], backprops.shape[2]
    turned = activations.dtype == backprops.dtype and _tiles.turns(T, D, P, dtype)
    if turned:
        tile = replace(tile, TMA=False)
        activations, backprops = (lengthened(x.mT, _tiles.ROW_STEP) for x in (activations, backprops))
    a, b, described = row_sources(tile, (activations, tile.BLOCK_K), (backprops, tile.BLOCK_K))
    partials = empty((N, outputs, pairs), torch.float32, device)
    launch(
        _gram_norm_kernel,
        N * pairs,
        tile,
        device,
        a=a,
        b=b,
        row_norm_a_ptr=row_norm_activations,
        row_norm_b_ptr=row_norm_backprops,
        partials_ptr=partials,
        runs_ptr=runs,
        stride_an=activations.stride(0),
        stride_at=activations.stride(1),  # of features, where they are turned
        stride_bn=backprops.stride(0),
        stride_bt=backprops.stride(1),
        stride_ran=row_norm_activations.stride(0) if bound else 0,
        stride_rat=row_norm_activations.stride(1) if bound else 0,
        stride_rbn=row_norm_backprops.stride(0) if bound else 0,
        stride_rbt=row_norm_backprops.stride(1) if bound else 0,
        stride_sn=outputs * pairs,
        T=T,
        D=D,
        P=P,
        BIAS=bias,
        BOUND=bound,
        CHAIN=_tiles.CHAIN if max(D, P) > _tiles.CHAIN else 0,
        TURNED=turned,
        ROW_STEP=_tiles.ROW_STEP,
        TMA=described,
        WIDEN=widens(_gram_norm_kernel),
        BLOCK_T=tile.BLOCK_T,
        BLOCK_K=tile.BLOCK_K,
    )
    return partials
