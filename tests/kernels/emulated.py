"""Lookup norms by the emulator of PTX that `make emulate` runs, which has the cases of the other kernels itself.

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

from dpfast.kernels import lookup_norm
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
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(not all(results))
