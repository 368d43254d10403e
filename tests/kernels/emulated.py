"""Lookup norms and row products by the emulator of PTX that `make emulate` runs, which has the other cases itself.

    python tests/kernels/emulated.py FOLDER_OF_THE_EMULATOR --arch 80

Compiled as for a GPU, executed on the CPU, compared with fp64; findings are accesses out of bounds, races and the like.
"""

import argparse
import sys

sys.path.append(sys.argv[1])

import device  # first: it makes Triton compile
import run
import torch
from test_lookup_norm import lookups, oracle

from dpfast.kernels import lookup_norm, outer_norm, outer_product
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("emulator")
    parser.add_argument("--arch", type=int, default=80)
    options = parser.parse_args()
    results = [passes(device.Emulator(options.arch), *case) for case in CASES]
    results += [products_pass(device.Emulator(options.arch), *case) for case in PRODUCTS]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(not all(results))
