"""Compiles grouped norms for GPUs that are not here: as ahead_worker.py, for launchers that take lists."""

import json
import sys

import torch
from ahead_worker import compile_launch, recording  # first: it chooses the compiler before Triton is imported

from dpfast.kernels import grouped_outer_norm


def compile_job(job):
    dtype = getattr(torch, job["dtype"])
    factors, samples, of_units = 3, 8, {}
    if job["runs"]:
        factors = samples = 1
        of_units = {"runs": torch.empty((8, 2), dtype=torch.int64, device="meta"), "longest": 1024}
    a, b = ([torch.empty((samples, 1024, job[size]), dtype=dtype, device="meta")] * factors for size in "DP")
    with recording(job["arch"]) as launches:
        grouped_outer_norm(a, b, keep=True, **of_units)
    return compile_launch(launches[0], job["arch"])


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(json.dumps(job | compile_job(job)), flush=True)
