"""Large fp32 products on a CPU, by oneDNN and by torch's own way (MKL), with the instructions that each uses.

    python benchmarks/products.py                                            as the machine is
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/products.py                    as one without AVX-512

One thread, CPU time, the two in turn; rows go to results/products.jsonl, by which `arithmetic/products.py` chooses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rows import RESULTS, Rows, environment
from torch import Tensor

from dpfast.arithmetic import instruction_set, products

SHAPES = [(256, 128, 256), (256, 128, 1024), (1000, 128, 256), (512, 128, 128), (1024, 256, 1024), (1024, 1024, 1024)]
"""(r, k, c) of P×T by T×D products and of clipped sums, from the smallest that is worth a call of oneDNN."""

LAYERS = [(64, 128, 128), (256, 64, 64), (1024, 384, 10), (1024, 128, 512), (1024, 768, 768), (8192, 16, 64)]
"""(rows, d, p) of layers' products: the output, and the gradient of the input."""

SAMPLES, ROUNDS, CALLS = 4, 15, 10


def seconds(calls: list[Callable[[], object]]) -> list[float]:
    """The median CPU time of each, taken in turn."""
    taken: list[list[float]] = [[] for _ in calls]
    for round_ in range(ROUNDS + 1):
        for call, times in zip(calls, taken, strict=True):
            start = time.process_time()
            call()
            if round_:  # the first warms up
                times.append(time.process_time() - start)
    return [statistics.median(times) for times in taken]


def measure(rows: Rows, shape: tuple[int, int, int]) -> dict:
    """One row. Raises AssertionError where the two differ by more than rounding."""
    r, k, c = shape
    torch.manual_seed(0)
    x, y, out = torch.randn(SAMPLES, k, r).mT, torch.randn(SAMPLES, k, c), torch.empty(SAMPLES, r, c)

    def onednn() -> None:
        for x_n, y_n, out_n in zip(x, y, out, strict=True):
            out_n.copy_(products.onednn(x_n, y_n.mT))

    def torchs_own() -> None:
        torch.bmm(x, y, out=out)

    exact = x.double() @ y.double()
    for call in (onednn, torchs_own):
        call()
        assert (out - exact).norm() <= 1e-6 * exact.norm()
    one, own = seconds([onednn, torchs_own])
    return add(rows, one, own, SAMPLES * r * k * c, shape=list(shape))


def add(rows: Rows, one: float, own: float, macs: int, **of: list[int]) -> dict:
    """A row of the seconds that oneDNN and torch's own way take for so many multiply-adds."""
    used = {"onednn": instruction_set.of_onednn(), "mkl": instruction_set.of_mkl()}
    return rows.add(**of, **used, onednn_over_mkl=round(one / own, 3), gflops_mkl=round(2e-9 * macs / own, 1))


def measure_layer(rows: Rows, shape: tuple[int, int, int]) -> dict:
    """Of both products, as :func:`measure`."""
    n, d, p = shape
    torch.manual_seed(0)
    x, gradient, weight, bias = torch.randn(n, d), torch.randn(n, p), torch.randn(p, d), torch.randn(p)

    def onednn() -> list[Tensor]:
        return [products.as_it_stands(x, weight, bias), products.as_it_stands(gradient, weight.mT)]

    def torchs_own() -> list[Tensor]:
        return [torch.addmm(bias, x, weight.mT), torch.mm(gradient, weight)]

    for found, own in zip(onednn(), torchs_own(), strict=True):
        assert (found - own).norm() <= 1e-6 * own.norm()
    one, own = seconds([lambda: [onednn() for _ in range(CALLS)], lambda: [torchs_own() for _ in range(CALLS)]])
    return add(rows, one, own, 2 * CALLS * n * d * p, layer=list(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "products.jsonl")
    rows = Rows(parser.parse_args().out, environment("cpu"))
    torch.set_num_threads(1)
    table = Table("r × k × c", "oneDNN", "MKL", "oneDNN over MKL", "MKL GFLOP/s")
    for measured, shapes in ((measure, SHAPES), (measure_layer, LAYERS)):
        for shape in shapes:
            row = measured(rows, shape)
            figures = (str(row[name]) for name in ("onednn", "mkl", "onednn_over_mkl", "gflops_mkl"))
            table.add_row("×".join(map(str, shape)) + (", a layer" if "layer" in row else ""), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
