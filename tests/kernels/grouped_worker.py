"""Compiles grouped norms for GPUs that are not here; as ahead_worker.py. Jobs come as one JSON list."""

import json
import os
import sys
from dataclasses import asdict
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch

from dpfast.kernels import _launch, grouped_norm


def record(job):
    launches = []

    def recorder(kernel, programs, tile, device, **arguments):
        launches.append((kernel, arguments, tile))

    dtype = getattr(torch, job["dtype"])
    a, b = ([torch.empty((8, 1024, job[size]), dtype=dtype, device="meta")] * 3 for size in "DP")
    with (
        mock.patch.object(grouped_norm, "launch", recorder),
        mock.patch.object(grouped_norm, "arch_of", lambda tensor: job["arch"]),
        mock.patch.object(grouped_norm, "sum_partials", lambda partials, length: partials.T[:2]),
    ):
        grouped_norm.grouped_outer_norm(a, b, keep=True)
    return launches[0]


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        kernel, arguments, tile = record(job)
        signature, constexprs, aligned = _launch.specialize(kernel, arguments)
        report = _launch.compile_ahead(kernel, signature, constexprs, _launch.TARGETS[job["arch"]], tile, aligned)
        print(json.dumps(job | asdict(report)), flush=True)
