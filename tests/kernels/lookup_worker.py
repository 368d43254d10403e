"""Compiles lookup norms for GPUs that are not here: as ahead_worker.py."""

import json
import sys

import torch
from ahead_worker import compile_launch, recording  # first: it chooses the compiler before Triton is imported

from dpfast.kernels import lookup_norm


def compile_job(job):
    indices = torch.empty((8, 1024), dtype=torch.int64, device="meta")
    backprops = torch.empty((8, 1024, job["D"]), dtype=getattr(torch, job["dtype"]), device="meta")
    with recording(job["arch"]) as launches:
        lookup_norm(indices, backprops)
    return compile_launch(launches[0], job["arch"])


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(json.dumps(job | compile_job(job)), flush=True)
