"""Lookup norms, sums of rows, noise, row products and runs of rows by the emulator of PTX: the rest of `make emulate`.

    python tests/kernels/emulated.py FOLDER_OF_THE_EMULATOR --arch 80

Compiled as for a GPU, executed on the CPU, compared with fp64; findings are accesses out of bounds, races and the like.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path += [sys.argv[1], str(Path(__file__).parents[1] / "support")]

import device  # first: it makes Triton compile
import run
import torch
from test_lookup_norm import lookups, oracle
from test_noise import fresh, numbers

from dpfast.kernels import (
    _tiles,
    add_noise,
    gram_norm,
    grouped_outer_norm,
    lookup_norm,
    normalized_sum,
    outer_norm,
    outer_product,
    row_norm,
    sum_runs,
    weighted_rows,
)
from dpfast.kernels._tiles import Tile
from dpfast.kernels.lookup_norm import row_tile

# (N, T, D), how many rows the table has, dtype, layout of the backprops, padding_idx
CASES = [
    ((3, 40, 48), 7, torch.bfloat16, "contiguous", None),
    ((3, 40, 47), 7, torch.float16, "padded", 2),
    ((2, 33, 64), 1000, torch.float32, "time_first", None),
    ((2, 70, 300), 1, torch.bfloat16, "contiguous", None),
    ((2, 9, 1), 3, torch.float32, "one_sample", 0),
    ((1, 1, 16), 1, torch.bfloat16, "contiguous", None),
    ((2, 21, 1100), 5, torch.float32, "padded8", 1),
    ((2, 21, 768), 5, torch.bfloat16, "one_position", None),
    ((2, 17, 48), 4, torch.bfloat16, "far_both", 3),
]


# (N, T, D, P), dtype, layouts of activations and backprops, tile
PRODUCTS = [
    ((3, 37, 50, 70), torch.bfloat16, ("padded", "time_first"), Tile(16, 16, 32, 0, 4, 2, "test")),
    ((2, 70, 64, 144), torch.float16, ("padded8", "contiguous"), Tile(32, 64, 128, 0, 4, 3, "test")),
    ((2, 50, 47, 61), torch.float32, ("padded", "padded"), None),
    ((2, 130, 128, 256), torch.bfloat16, ("contiguous", "contiguous"), None),
    ((2, 130, 128, 256), torch.bfloat16, ("time_first", "contiguous"), None),
    ((2, 40, 48, 64), torch.float32, ("contiguous", "contiguous"), None),
    ((3, 300, 48, 64), torch.bfloat16, ("contiguous", "contiguous"), Tile(32, 64, 64, 0, 4, 3, "test", PART=128)),
    ((2, 17, 48, 32), torch.bfloat16, ("far_both", "far_both"), Tile(32, 64, 64, 64, 4, 3, "test", TMA=True)),
    ((1, 1, 1, 1), torch.float32, ("contiguous", "contiguous"), None),
]

# The same, whose rows are copied to multiples of 16, as those of larger layers are.
COPIED = [
    ((2, 70, 50, 61), torch.bfloat16, ("padded", "contiguous"), Tile(32, 64, 64, 64, 4, 3, "test", TMA=True)),
    ((2, 140, 48, 37), torch.float16, ("contiguous", "time_first"), Tile(32, 64, 64, 64, 4, 3, "test")),
]


# (N, T, D) of rows that are normalised, and summed, dtype, layouts of the inputs and of backprops
NORMALISED = [
    ((3, 40, 50), torch.bfloat16, ("padded", "time_first")),
    ((2, 70, 64), torch.float16, ("contiguous", "padded8")),
    ((2, 33, 768), torch.bfloat16, ("contiguous", "contiguous")),
    ((2, 5, 1100), torch.float32, ("padded", "one_position")),
    ((1, 1, 1), torch.float32, ("contiguous", "contiguous")),
]

# entries, dtype, number of the first block
NOISE = [(9000, torch.bfloat16, 3), (8192, torch.float32, 0), (4097, torch.float16, 2**31 - 1), (1, torch.float32, 0)]

# lengths of units, (D, P), dtype, layout, tile: none, one row, borders of blocks and of chains
LENGTHS = [0, 1, 16, 15, 33, 17, 64, 130]
RUNS = [
    (LENGTHS, (50, 70), torch.bfloat16, "padded", Tile(16, 16, 32, 16, 4, 2, "test")),
    (LENGTHS, (64, 144), torch.float16, "padded8", Tile(32, 64, 128, 32, 4, 3, "test", TMA=True)),
    (LENGTHS, (64, 144), torch.bfloat16, "contiguous", Tile(64, 64, 128, 64, 4, 3, "test", TMA=True)),
    (LENGTHS, (47, 61), torch.float32, "padded", Tile(16, 32, 32, 16, 4, 2, "test")),
    ([300, 0, 290], (48, 64), torch.bfloat16, "contiguous", Tile(32, 64, 64, 64, 4, 3, "test", PART=128)),
    ([20, 0, 30], (128, 256), torch.bfloat16, "contiguous", None),
    ([130, 140], (128, 256), torch.bfloat16, "contiguous", None),
]


def run_launches(a, b, runs, tile):
    """(launch, what it gives of each unit, tolerance) of every launcher that takes runs."""
    gradients = [torch.einsum("tp,td->pd", b[0, i:j].double(), a[0, i:j].double()) for i, j in runs["runs"].tolist()]
    exact = torch.stack(gradients), torch.stack(gradients).square().sum((1, 2))
    norms = [x.double().norm(dim=2).float().nan_to_num() for x in (a, b)]  # nobody's rows are NaN
    bounded = dict(zip(("row_norm_activations", "row_norm_backprops"), norms, strict=True))
    products = torch.stack([(norms[0] * norms[1])[0, i:j].double().sum() for i, j in runs["runs"].tolist()])
    yield outer_norm(a, b, row_products=True, tile=tile, **runs)[::2], (exact[1], products)
    found = outer_product(a, b, norm=True, row_products=True, tile=tile, **runs)
    yield (found.grad_sample, found.sq_norm, found.row_products), (*exact, products)
    yield gram_norm(a, b, tile=tile, **bounded, **runs)[:1], exact[1:]
    yield (sum_runs(norms[0] * norms[1], runs["runs"]),), (products,)
    ids = torch.full(a.shape[1:2], -1)
    for n, (i, j) in enumerate(runs["runs"].tolist()):
        ids[i:j] = n
    indices = torch.arange(len(ids)).unsqueeze(0) % 5
    table = torch.zeros(len(runs["runs"]), 5, b.shape[2], dtype=torch.float64)
    table.index_put_((ids[ids >= 0], indices[0, ids >= 0]), b[0, ids >= 0].double(), accumulate=True)
    ends = runs["runs"].diff(dim=1).cumsum(0)
    in_order = torch.cat([torch.cat([ends.new_zeros(1, 1), ends[:-1]]), ends], dim=1)
    yield (
        (lookup_norm(indices, b, padding_idx=1, ids=ids, runs=in_order, entries=5).sq_norm,),
        (table[:, [0, 2, 3, 4]].square().sum((1, 2)),),
    )
    thin = grouped_outer_norm([a], [b[..., :16]], keep=True, **runs)
    yield (thin.grad_sample[0],), (exact[0][:, :16],)


def runs_pass(emulator, lengths, features, dtype, layout, tile):
    emulator.reset()
    emulator.strict.clear()
    # Two rows of nobody, NaN and not to be read, in front of each unit; units in another order than their rows.
    firsts = [2 + 2 * u + sum(lengths[:u]) for u in range(len(lengths))]
    places = [(first, first + length) for first, length in zip(firsts, lengths, strict=True)][::-1]
    nobodys = torch.ones(firsts[-1] + lengths[-1] + 2, dtype=torch.bool)
    for first, last in places:
        nobodys[first:last] = False
    pair = [run.make(emulator, 1, len(nobodys), F, dtype, layout, seed=F) for F in features]
    for x in pair:
        x[:, nobodys] = float("nan")
        emulator.register(x, *(x[:, first:last] for first, last in places))
    runs = {"runs": torch.tensor(places), "longest": max(lengths)}
    with device.emulating(emulator):
        found = list(run_launches(*pair, runs, tile))
    errors = [
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for actual, expected in found
        for x, y in zip(actual, expected, strict=True)
    ]
    findings = [found for found in emulator.findings if not found.startswith("note:")]
    right = all(error <= 2e-5 for error in errors) and not findings
    print(
        f"{'PASS' if right else 'FAIL'} runs {lengths} {features} {dtype} {layout} |"
        f" {' '.join(emulator.launches)} | {max(errors):.1e}",
        *findings,
        sep="\n     " if findings else "",
        flush=True,
    )
    return right


def products_pass(emulator, sizes, dtype, layouts, tile):
    emulator.reset()
    emulator.strict.clear()
    N, T, D, P = sizes
    a, b = (
        run.make(emulator, N, T, D, dtype, layouts[0], seed=1),
        run.make(emulator, N, T, P, dtype, layouts[1], seed=2),
    )
    exact = (a.double().norm(dim=2) * b.double().norm(dim=2)).sum(1)
    gradients = torch.einsum("ntp,ntd->npd", b.double(), a.double())
    squares = torch.einsum("ntp,ntd->npd", b.double().abs(), a.double().abs()).square().sum((1, 2))
    errors = []
    for launcher, options in ((outer_norm, {}), (outer_product, {"bias": True, "norm": True})):
        with device.emulating(emulator):
            found = launcher(a, b, row_products=True, tile=tile, **options)
        errors.append(((found.row_products.double() - exact).abs() / exact).max().item())
        errors.append(((found.sq_norm.double() - gradients.square().sum((1, 2))).abs() / squares).max().item())
    right = max(errors) <= 8e-6 and not emulator.findings
    print(
        f"{'PASS' if right else 'FAIL'} row_products {sizes} {dtype} {' '.join(layouts)} |"
        f" {' '.join(emulator.launches)} | {max(errors):.1e}",
        *emulator.findings,
        sep="\n     " if emulator.findings else "",
        flush=True,
    )
    return right


def normalised_pass(emulator, sizes, dtype, layouts):
    emulator.reset()
    emulator.strict.clear()
    x, b = (run.make(emulator, *sizes, dtype, layout, seed=seed) for seed, layout in enumerate(layouts))
    errors = []

    def compare(actual, expected, scale):
        errors.append(((actual.double() - expected).abs() / scale.clamp(min=1e-30)).max().item())

    for mean in (True, False):
        with device.emulating(emulator):
            found = normalized_sum(x, b, eps=1e-2, mean=mean, bias=mean, constant=mean, relative=1e-6, added=1e-5)
        centred = x.double() - (x.double().mean(-1, keepdim=True) if mean else 0.0)
        rstd = (centred.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
        product = b.double() * centred * rstd
        compare(found.sums, product.sum(1), (b.double().abs() * (x.double().abs() + 1.0) * rstd).sum(1))
        compare(found.row_norm_backprops, b.double().norm(dim=2), b.double().norm(dim=2))
        if mean:
            compare(found.bias, b.double().sum(1), b.double().abs().sum(1))
    with device.emulating(emulator):
        norms = row_norm(x)
        weights = torch.linspace(0.0, 1.0, sizes[1])
        rows = run.make(emulator, *sizes, torch.float32, "contiguous", seed=5)
        total, rounded = weighted_rows(rows, weights), weighted_rows(rows, weights, out_dtype=torch.bfloat16)
    compare(norms, x.double().norm(dim=2), x.double().norm(dim=2))
    exact = torch.einsum("j,bjk->bk", weights.double(), rows.double())
    compare(total, exact, torch.einsum("j,bjk->bk", weights.double(), rows.double().abs()))
    right = max(errors) <= 8e-6 and torch.equal(rounded, total.to(torch.bfloat16)) and not emulator.findings
    print(
        f"{'PASS' if right else 'FAIL'} normalized_sum, row_norm, weighted_rows {sizes} {dtype} {' '.join(layouts)} |"
        f" {' '.join(emulator.launches)} | {max(errors):.1e}",
        *emulator.findings,
        sep="\n     " if emulator.findings else "",
        flush=True,
    )
    return right


def passes(emulator, sizes, entries, dtype, layout, padding_idx):
    emulator.reset()
    emulator.strict.clear()
    indices, backprops = lookups(*sizes[:2], entries), run.make(emulator, *sizes, dtype, layout, seed=1)
    with device.emulating(emulator):
        found = lookup_norm(indices, backprops, padding_idx=padding_idx)
    rows = row_tile(sizes[2], f"sm_{emulator.capability}").BLOCK_T
    sq_norm, products, scale = oracle(indices, backprops, padding_idx, rows)
    errors = [
        ((actual.double() - expected).abs() / of.clamp(min=1e-30)).max().item()
        for actual, expected, of in ((found.sq_norm, sq_norm, scale), (found.sq_products, products, products))
    ]
    right = max(errors) <= 4e-6 and not emulator.findings and len(emulator.launches) == 1 + (sizes[1] > 1)
    print(
        f"{'PASS' if right else 'FAIL'} lookup_norm {sizes} of {entries} rows {dtype} {layout} padding {padding_idx} |"
        f" {' '.join(emulator.launches)} | {errors[0]:.1e} {errors[1]:.1e}",
        *emulator.findings,
        sep="\n     " if emulator.findings else "",
        flush=True,
    )
    return right


def noise_passes(emulator, size, dtype, first):
    emulator.reset()
    emulator.strict.clear()
    x, seeds = torch.linspace(-1.0, 1.0, size).to(dtype), fresh(size)
    before = x.double()
    with device.emulating(emulator):
        following = add_noise(x, seeds, 0.5, share=0.3, first=first)
    exact = 0.3 * before + 0.5 * numbers(size, seeds, first)
    error = ((x.double() - exact).abs() - torch.finfo(dtype).eps / 2 * exact.abs()).max().item()
    right = error <= 2e-6 and following == first + -(-size // 4096) and not emulator.findings
    launches = " ".join(emulator.launches)
    print(
        f"{'PASS' if right else 'FAIL'} add_noise {size} {dtype} block {first} | {launches} | {error:.1e}",
        *emulator.findings,
        sep="\n     " if emulator.findings else "",
        flush=True,
    )
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("emulator")
    parser.add_argument("--arch", type=int, default=80)
    options = parser.parse_args()
    results = [passes(device.Emulator(options.arch), *case) for case in CASES]
    results += [products_pass(device.Emulator(options.arch), *case) for case in PRODUCTS]
    with mock.patch.multiple(_tiles, _COPY_FROM=1, _COPY_REUSE=1):
        results += [products_pass(device.Emulator(options.arch), *case) for case in COPIED]
    results += [noise_passes(device.Emulator(options.arch), *case) for case in NOISE]
    results += [normalised_pass(device.Emulator(options.arch), *case) for case in NORMALISED]
    results += [runs_pass(device.Emulator(options.arch), *case) for case in RUNS]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(not all(results))
