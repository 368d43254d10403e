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
from ahead import TARGETS, compile_ahead, specialize

import dpfast.kernels
from dpfast.kernels import _launch, _tiles


@contextlib.contextmanager
def recording(arch):
    """Launches as a list of (kernel, arguments, tile, programs), none made, for tensors said to be on `arch`."""
    launches = []

    def recorder(kernel, programs, tile, device, **arguments):
        launches.append((kernel, arguments, tile, programs))

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("dpfast.kernels.") and module is not _launch:
                for replaced, replacement in (("launch", recorder), ("arch_of", lambda tensor: arch)):
                    if hasattr(module, replaced):
                        stack.enter_context(mock.patch.object(module, replaced, replacement))
        yield launches


def record(job, tile):
    """(kernel, arguments, tile, programs) of the launch that the job's launcher makes."""
    N, T, D, P = 1 if job.get("runs") else 8, job["T"], job["D"], job["P"]
    dtype = getattr(torch, job["dtype"])
    a = torch.empty((N, T, D), dtype=dtype, device="meta")
    b = torch.empty((N, T, P), dtype=dtype, device="meta")
    verb, options = job["verb"], {"bias": job["options"]}
    if verb in ("outer_product", "outer_norm"):
        options["row_products"] = job["options"]
    if verb == "outer_product":
        options["norm"] = job["options"]
    if verb == "gram_norm" and job["options"]:
        row_norm = torch.empty((N, T), device="meta")
        options |= {"row_norm_activations": row_norm, "row_norm_backprops": row_norm}
    if job.get("runs"):
        del options["bias"]
        options |= {"runs": torch.empty((8, 2), dtype=torch.int64, device="meta"), "longest": T}
    inputs = (a, b, torch.empty(N, device="meta")) if verb == "weighted_sum" else (a, b)
    with recording(job["arch"]) as launches:
        if verb == "row_sq_norm":
            dpfast.kernels.row_sq_norm(a)
        else:
            getattr(dpfast.kernels, verb)(*inputs, tile=tile, **options)
    return launches[0]


def compile_launch(launch, arch):
    kernel, arguments, tile, _ = launch
    signature, constexprs, aligned = specialize(kernel, arguments)
    return asdict(compile_ahead(kernel, signature, constexprs, TARGETS[arch], tile, aligned))


def compile_job(job):
    return compile_launch(record(job, _tiles.Tile(**job["tile"])), job["arch"])


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(compile_job(json.loads(line))), flush=True)
