"""Compiles what the launchers launch, for GPUs that are not here. Run as a program, not collected.

    python ahead_worker.py < jobs.jsonl > reports.jsonl

A process of its own, because the tests' process interprets Triton: a function is either interpreted or
compiled for as long as its process lives. Launchers are called on meta tensors with `launch` replaced by a
recorder, so that what is compiled is the very launch they would make, its flags and alignments included.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch

from dpfast.kernels import (
    _launch,
    _partials,
    _tiles,
    gram_norm,
    outer_norm,
    outer_product,
    row_sq_norm,
    weighted_sum,
)

MODULES = {
    verb: sys.modules[f"dpfast.kernels.{verb}"]
    for verb in ("row_sq_norm", "outer_product", "outer_norm", "gram_norm", "weighted_sum")
}


def record(verb, T, D, P, dtype_a, dtype_b, arch, tile):
    """(kernel, arguments, tile) of the launch that `verb` makes, with everything optional asked for."""
    launches = []

    def recorder(kernel, programs, tile, device, **arguments):
        launches.append((kernel, arguments, tile))

    N = 8
    a = torch.empty((N, T, D), dtype=dtype_a, device="meta")
    b = torch.empty((N, T, P), dtype=dtype_b, device="meta")
    per_row = torch.empty((N, T), device="meta")
    per_sample = torch.empty(N, device="meta")
    module = MODULES[verb]
    patches = [
        mock.patch.object(module, "launch", recorder),
        mock.patch.object(module, "arch_of", lambda tensor: arch),
        mock.patch.object(_partials, "launch", recorder),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if verb == "row_sq_norm":
            row_sq_norm(a)
        elif verb == "outer_product":
            outer_product(a, b, bias=True, norm=True, tile=tile)
        elif verb == "outer_norm":
            outer_norm(a, b, bias=True, tile=tile)
        elif verb == "gram_norm":
            gram_norm(a, b, row_norm_activations=per_row, row_norm_backprops=per_row, bias=True, tile=tile)
        else:
            weighted_sum(a, b, per_sample, bias=True, tile=tile)
    return launches[0]


def compile_job(job):
    dtype_a, dtype_b = (getattr(torch, name) for name in job["dtypes"])
    tile = _tiles.Tile(**job["tile"])
    kernel, arguments, tile = record(
        job["verb"], job["T"], job["D"], job["P"], dtype_a, dtype_b, job["arch"], tile
    )
    signature, constexprs, aligned = _launch.specialize(kernel, arguments)
    compiled = _launch.compile_ahead(
        kernel, signature, constexprs, _launch.TARGETS[job["arch"]], tile, aligned
    )
    return asdict(compiled)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(compile_job(json.loads(line))), flush=True)
