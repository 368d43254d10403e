"""The verbs and their peers, op by op, on shapes named after real layers.

    python -m pytest benchmarks --benchmark-only
    python -m pytest benchmarks --benchmark-only -k "norm and lora" --benchmark-columns=median,iqr,rounds

A group is a verb on a layer; in it stand dpfast and the ways that people compute the same today. Every answer is
compared with fp64 before it is timed. Beside each figure stands its share of the limit: the rate of one plain product
of the same FLOPs in the same run. fastDP is no package that can be installed, so it is no peer here.
"""

from __future__ import annotations

import pytest
import torch
from contenders import CONTENDERS, TOLERANCE, error, exact
from layers import Layer

from dpfast.arithmetic import cost, ops
from dpfast.report.timing import milliseconds

LAYERS = {
    "cpu": [
        Layer("gpt_qkv", 16, 128, 256, 768, torch.float32),
        Layer("gpt_up", 16, 128, 256, 1024, torch.float32),
        Layer("long_up", 4, 1024, 128, 512, torch.float32),
        Layer("lora_a", 8, 256, 256, 8, torch.float32),
        Layer("lora_b", 8, 256, 8, 256, torch.float32),
        Layer("mlp", 16, 1, 1024, 1024, torch.float32),
        Layer("conv3x3", 16, 1024, 288, 32, torch.float32),
    ],
    "cuda": [
        Layer("gpt2_up", 8, 1024, 768, 3072),
        Layer("llama_up", 4, 1024, 2048, 8192),
        Layer("lora_a", 16, 1024, 4096, 8),
        Layer("conv3x3", 32, 784, 1152, 128),
    ],
}
DEVICES = [device for device in LAYERS if device == "cpu" or torch.cuda.is_available()]


def peers(verb):
    return {
        "bmm": CONTENDERS[verb]["cuBLAS"],
        "Opacus": CONTENDERS[verb]["Opacus"],
        "float hook": CONTENDERS[verb]["float hook"],
    }


VERBS = {
    "grad_sample": {"dpfast": lambda a, b, c: ops.grad_sample(a, b), **peers("grad_sample")},
    "direct norm": {
        **{f"dpfast {way}": lambda a, b, c, way=way: ops.sq_norm(a, b, way=way) for way in ("auto", "gram", "direct")},
        **peers("direct norm"),
        "Opacus ghost": CONTENDERS["Gram norm"]["Opacus"],
    },
    "weighted sum": {"dpfast": lambda a, b, c: ops.weighted_sum(a, b, c), **peers("weighted sum")},
}


def cases():
    for device in DEVICES:
        for layer in LAYERS[device]:
            for verb, named in VERBS.items():
                for name in named:
                    if layer.T > 1 or name not in ("dpfast gram", "dpfast direct"):  # T = 1 goes by rank 1
                        marks = pytest.mark.benchmark(group=f"{verb}, {layer.name}, {device}")
                        yield pytest.param(
                            device, layer, verb, name, marks=marks, id=f"{device}-{layer.name}-{verb}-{name}"
                        )


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("device", "layer", "verb", "name"), cases())
def test_ops(benchmark, device, layer, verb, name):
    inputs = layer.inputs(device)
    contender = VERBS[verb][name]
    found = error(verb, contender(*inputs), exact(verb, *inputs))
    ours = name.startswith("dpfast")
    assert found <= TOLERANCE["dpfast" if ours else "Opacus"]

    def call():
        contender(*inputs)
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(call, rounds=7, warmup_rounds=1)
    flops = 2 * layer.N * layer.T * layer.D * layer.P
    if ours and verb == "direct norm":
        way = name.removeprefix("dpfast ")
        way = cost.norm_way(layer.T, layer.D, layer.P) if way == "auto" else way
        flops = layer.N * cost.norm_flops(way, layer.T, layer.D, layer.P)
    benchmark.extra_info.update(error=float(f"{found:.1g}"))
    if benchmark.stats is not None:
        a, b, _ = inputs
        left, right = b.flatten(0, 1).mT, a.flatten(0, 1)
        rate = 2 * left.numel() * right.shape[1] / (1e-3 * milliseconds(lambda: left @ right, device))
        gflops = flops / benchmark.stats.stats.median / 1e9
        benchmark.extra_info.update(gflops=round(gflops, 1), share_of_mm=round(1e9 * gflops / rate, 3))
