"""The verbs, op by op, on shapes named after real layers: ``python -m pytest benchmarks --benchmark-only``.

Beside each figure stands its share of the limit: the rate of one plain ``mm`` of the same FLOPs in the same run.
Every answer is compared with fp64 before it is timed.
"""

from __future__ import annotations

import time

import pytest
import torch

from dpfast import cost, ops
from dpfast.testing import relative_error

LAYERS = {  # N, T, D, P
    "gpt_qkv": (16, 128, 256, 768),
    "gpt_up": (16, 128, 256, 1024),
    "long_up": (4, 1024, 128, 512),
    "lora_a": (8, 256, 256, 8),
    "lora_b": (8, 256, 8, 256),
    "mlp": (256, 1, 1024, 1024),
    "conv3x3": (16, 1024, 288, 32),
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    n, t, d, p = LAYERS[request.param]
    return torch.randn(n, t, d), torch.randn(n, t, p)


def exact(a, b):
    return torch.einsum("ntp,ntd->npd", b.double(), a.double())


def _measure(benchmark, call, flops, a, b):
    """Times ``call`` and notes its rate next to that of one product of (P, N·T) and (N·T, D)."""
    benchmark.extra_info.update(shape=[*a.shape, b.shape[-1]])
    benchmark.pedantic(call, rounds=7, warmup_rounds=1)
    left, right = b.flatten(0, 1).mT, a.flatten(0, 1)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    limit = 2 * left.numel() * right.shape[1] / sorted(seconds)[3]
    if benchmark.stats is not None:
        benchmark.extra_info["gflops"] = round(flops / benchmark.stats.stats.median / 1e9, 1)
        benchmark.extra_info["share_of_mm"] = round(flops / benchmark.stats.stats.median / limit, 3)


def _gemm_flops(a, b):
    return 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]


@pytest.mark.benchmark(group="grad_sample")
def test_grad_sample(benchmark, layer):
    a, b = layer
    if a.shape[0] * a.shape[2] * b.shape[2] > 2**26:
        a, b = a[:16], b[:16]
    assert relative_error(ops.grad_sample(a, b), exact(a, b)) <= 1e-5
    _measure(benchmark, lambda: ops.grad_sample(a, b), _gemm_flops(a, b), a, b)


@pytest.mark.benchmark(group="sq_norm")
@pytest.mark.parametrize("way", ["auto", "gram", "direct"])
def test_sq_norm(benchmark, layer, way):
    a, b = layer
    n, t, d = a.shape
    p = b.shape[2]
    if t == 1 and way != "auto":
        pytest.skip("T = 1 goes by rank 1")
    expected = exact(a[:4], b[:4]).flatten(1).norm(dim=1)
    assert relative_error(ops.norm_sample(a, b, way=way)[:4], expected) <= 1e-5
    chosen = cost.norm_way(t, d, p) if way == "auto" else way
    _measure(benchmark, lambda: ops.sq_norm(a, b, way=way), n * cost.norm_flops(chosen, t, d, p), a, b)


@pytest.mark.benchmark(group="weighted_sum")
def test_weighted_sum(benchmark, layer):
    a, b = layer
    c = torch.rand(a.shape[0])
    expected = torch.einsum("n,ntp,ntd->pd", c.double(), b.double(), a.double())
    assert relative_error(ops.weighted_sum(a, b, c), expected) <= 1e-5
    _measure(benchmark, lambda: ops.weighted_sum(a, b, c), _gemm_flops(a, b), a, b)
