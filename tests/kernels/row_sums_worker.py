"""Compiles sums of rows and of normalised rows, and noise, for GPUs that are not here: as ahead_worker.py."""

import json
import sys

import torch
from ahead_worker import compile_launch, recording  # first: it chooses the compiler before Triton is imported

from dpfast.kernels import add_noise, normalized_sum, row_norm, weighted_rows


def launched(job):
    D, dtype = job["D"], getattr(torch, job["dtype"])
    x = torch.empty((8, 1024, D), dtype=dtype, device="meta")
    if job["kernel"] == "normalized_sum":
        layer_norm = job["options"]
        normalized_sum(x, x, eps=1e-8, mean=layer_norm, bias=layer_norm, constant=layer_norm, relative=1e-6, added=1e-6)
    elif job["kernel"] == "row_norm":
        row_norm(x)
    elif job["kernel"] == "add_noise":
        add_noise(x, torch.empty(2, dtype=torch.int64, device="meta"), 1.0, share=0.1 if job["options"] else 1.0)
    else:
        rows = torch.empty((1, 8, 1024 * D), device="meta")
        weighted_rows(rows, torch.empty(8, device="meta") if job["options"] else None, out_dtype=dtype)


def compile_job(job):
    with recording(job["arch"]) as launches:
        launched(job)
    return compile_launch(launches[0], job["arch"])


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(json.dumps(job | compile_job(job)), flush=True)
