"""Norms and bounds that are finished together, from what kernels have left, are those of `bounds` one by one."""

import pytest
import torch

from dpfast.arithmetic import bounds, finish, kernel_norms
from dpfast.arithmetic.kernel_norms import import_kernels

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
