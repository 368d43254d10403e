"""Norms and bounds that are finished together, from what kernels have left, are those of `bounds` one by one."""

import pytest
import torch

from dpfast.arithmetic import bounds, finish, finished, kernel_norms
from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.arithmetic.stacked_kernel_norms import KernelDirect, KernelGram, KernelRankOne, direct_terms, gram_terms

FP32 = torch.float32
N = 3
SHAPES = [(40, 70, 80), (40, 67, 130), (9, 70, 80), (150, 80, 70)]  # T, D, P: not thin, several lengths of what is left


def pairs(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(N, t, size, generator=generator) for size in sizes] for t, *sizes in shapes]


def direct(a, b):
    kernels, _ = import_kernels()
    left = kernels.outer_norm(a, b, row_products=True)
    numel = a.shape[2] * b.shape[2]
    error = bounds.direct_error(
        left.row_products.double(), positions=a.shape[1], numel=numel, dtype=FP32, kernel_chain=kernels.CHAIN
    )
    return bounds.dense(left.sq_norm.double(), width=1024, numel=numel, dtype=FP32, error=error)


def gram(a, b):
    kernels, _ = import_kernels()
    norms = kernels.row_norm(a), kernels.row_norm(b)
    left = kernels.gram_norm(a, b, row_norm_activations=norms[0], row_norm_backprops=norms[1])
    wide = [x.double() for x in norms]
    return bounds.gram(
        *(x.double() for x in (left.sq_norm, left.bound_activations, left.bound_backprops, left.bound_product)),
        sum_a=wide[0].sum(1),
        sum_b=wide[1].sum(1),
        row_products=(wide[0] * wide[1]).sum(1),
        shape=(a.shape[1], a.shape[2], b.shape[2]),
        row=512,
        dtype=FP32,
        kernel_chain=kernels.CHAIN,
    )


def rank_one(a, b):
    kernels, _ = import_kernels()
    squares = [kernels.row_sq_norm(x).squeeze(1).double() for x in (a, b)]
    d, p = a.shape[2], b.shape[2]
    return bounds.rank_one(*squares, d=d, p=p, width=max(d, p), dtype=FP32)


@pytest.mark.parametrize("way", [direct, gram, rank_one])
def test_they_are_those_of_bounds(kernels_run, way):
    shapes = [(1, *sizes) for _, *sizes in SHAPES] if way is rank_one else SHAPES
    inputs = pairs(shapes)
    together = finish([kernel_norms.unfinished(a, b, way.__name__) for a, b in inputs], N)
    for i, (a, b) in enumerate(inputs):
        alone = kernel_norms.sq_norm(a, b, way.__name__)
        for found, one, exact in zip(together, alone, way(a, b), strict=True):
            assert torch.equal(found[i], one)
            torch.testing.assert_close(found[i], exact, rtol=1e-12, atol=0.0)


def test_several_layers_in_one(kernels_run):
    """Of layers that stand one after the other as samples, each has its own."""
    one, two = pairs([SHAPES[0]] * 2)
    stacked = [torch.cat(x) for x in zip(one, two, strict=True)]
    found = finish([kernel_norms.unfinished(*x, "direct") for x in (stacked, one)], N)
    for row, pair in zip(zip(*found, strict=True), (one, two, one), strict=True):
        for x, y in zip(row, kernel_norms.sq_norm(*pair, "direct"), strict=True):
            assert torch.equal(x, y)


# -- every term, of numbers that no kernel has to leave: what underflow hides counts where all else is nothing ---------

CHAIN = 128
LEFT = [(1, 5, 300), (2, 7, 41), (1, 5, 60), (1, 1, 0)]  # layers, what is left of each sample, positions


def added(rows):
    return rows.double().sum(1)


def left(*shape, scale):
    return torch.rand(shape) * scale


def directs(of_a, of_b):
    parts, expected = [], []
    for i, (layers, length, t) in enumerate(LEFT):
        squares = left(layers * N, length, scale=(of_a * of_b) ** 2)
        products, numel = left(layers * N, length + 1, scale=of_a * of_b), 70 + i
        terms = direct_terms(width=1024, numel=numel, positions=t, chain=CHAIN)
        parts.append(KernelDirect(squares, products, terms, added))
        error = bounds.direct_error(added(products), positions=t, numel=numel, dtype=FP32, kernel_chain=CHAIN)
        torch.testing.assert_close(parts[-1].error(), error, rtol=1e-13, atol=0.0)
        expected.append(bounds.dense(added(squares), width=1024, numel=numel, dtype=FP32, error=error))
    return parts, expected


def grams(of_a, of_b):
    parts, expected = [], []
    for i, (layers, length, t) in enumerate(LEFT):
        partials = left(layers * N, 4, length, scale=(of_a * of_b) ** 2) - 0.1 * (of_a * of_b) ** 2
        a, b = left(layers * N, t, scale=of_a), left(layers * N, t, scale=of_b)
        d, p = 40 + i, 300 + i
        parts.append(KernelGram(partials, (a, b), gram_terms(t=t, d=d, p=p, row=512, chain=CHAIN), added))
        sums = {"sum_a": added(a), "sum_b": added(b), "row_products": added(a.double() * b.double())}
        numbers = [added(x) for x in partials.unbind(1)]
        expected.append(bounds.gram(*numbers, **sums, shape=(t, d, p), row=512, dtype=FP32, kernel_chain=CHAIN))
    return parts, expected


def rank_ones(of_a, of_b):
    parts, expected = [], []
    for i, (layers, _, _) in enumerate(LEFT):
        squares = left(layers * N, scale=of_a**2), left(layers * N, scale=of_b**2)
        sizes = 40 + i, 300 + i
        terms = [x for size in sizes for x in bounds.dense_terms(width=size, numel=size, dtype=FP32)]
        parts.append(KernelRankOne(squares, tuple(terms)))
        d, p = sizes
        expected.append(bounds.rank_one(*(x.double() for x in squares), d=d, p=p, width=max(sizes), dtype=FP32))
    return parts, expected


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (0.0, 0.0), (1e-30, 1e-18), (1e-18, 1e-30), (1e9, 1e-20)], ids=str)
@pytest.mark.parametrize("kind", [directs, grams, rank_ones])
def test_no_term_is_missing(kind, sizes):
    parts, expected = kind(*sizes)
    found = finish(parts, N)
    for rows, one in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(rows, torch.cat([x.view(-1, N) for x in one]), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("way", ["direct", "gram", "rank_one"])
def test_samples_without_positions(kernels_run, way):
    norm = finished(kernel_norms.unfinished(torch.ones(N, 0, 70), torch.ones(N, 0, 80), way))
    assert norm.value.tolist() == [0.0] * N and (norm.upper < 1e-30).all()
