"""Compiles grouped norms for GPUs that are not here: as ahead_worker.py, for launchers that take lists."""

import json
import sys
from dataclasses import asdict

import torch
from ahead_worker import recording  # first: it chooses the compiler before Triton is imported

from dpfast.kernels import _launch, grouped_outer_norm


def compile_job(job):
    dtype = getattr(torch, job["dtype"])
    factors, samples, of_units = 3, 8, {}
    if job["runs"]:
        factors = samples = 1
        of_units = {"runs": torch.empty((8, 2), dtype=torch.int64, device="meta"), "longest": 1024}
    a, b = ([torch.empty((samples, 1024, job[size]), dtype=dtype, device="meta")] * factors for size in "DP")
    with recording(job["arch"]) as launches:
        grouped_outer_norm(a, b, keep=True, **of_units)
    kernel, arguments, tile, _ = launches[0]
    signature, constexprs, aligned = _launch.specialize(kernel, arguments)
    return asdict(_launch.compile_ahead(kernel, signature, constexprs, _launch.TARGETS[job["arch"]], tile, aligned))


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(json.dumps(job | compile_job(job)), flush=True)
