"""What the compiler makes of every launch, for GPUs that are not here.

For each kernel, dtype, architecture and tile of the table: it compiles, nothing spills, shared memory fits,
16-bit inputs go to the architecture's own tensor-core instruction and fp32 to none that rounds to TF32.
"""

import json
import os
import re
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch

from dpfast.kernels import _tiles

WORKER = Path(__file__).with_name("ahead_worker.py")
PROCESSES = 2

TENSOR_CORES = {"sm_80": r"\bHMMA", "sm_90": r"\bHGMMA", "sm_100": r"\bUTC\w*MMA", "gfx942": r"\bv_mfma"}
ANY_TENSOR_CORE = r"\b(?:HMMA|HGMMA|UTC\w*MMA|v_mfma\w*xf32)"


def job(verb, dtype, arch, tile, shape, *, options=True):
    T, D, P = shape
    aligned = D % 16 == P % 16 == 0
    return {
        "verb": verb,
        "T": T,
        "D": D,
        "P": P,
        "dtype": dtype,
        "arch": arch,
        "tile": asdict(tile),
        "options": options,
        "aligned": aligned,
    }


def jobs():
    """Every tile with a shape it is for.

    fp16 compiles as bf16 does, but for the parts of a flat weighted sum: its widest tiles stand for it. The
    widest tile of a verb is also compiled without options.
    """
    for arch, verb in product(_tiles.ARCHES, _tiles.VERBS):
        for dtype in ("bfloat16", "float16", "float32"):
            tiles = list(_tiles.distinct(verb, getattr(torch, dtype), arch).items())
            if dtype == "float16":
                tiles = [(tile, shape) for tile, shape in tiles if tile.layout == "flat"] + tiles[:1]
            for tile, shape in tiles:
                yield job(verb, dtype, arch, tile, shape)
            if dtype == "float32":
                yield job(verb, dtype, arch, tiles[0][0], (1024, 4095, 2049))
            if dtype != "float16" and verb != "row_sq_norm":
                yield job(verb, dtype, arch, *tiles[0], options=False)


def identify(job):
    tile = job["tile"]
    blocks = "x".join(str(tile[f"BLOCK_{axis}"]) for axis in "TDPK" if tile[f"BLOCK_{axis}"])
    flags = ("" if job["aligned"] else "-unaligned") + ("" if job["options"] else "-plain")
    return f"{job['arch']}-{job['verb']}-{job['dtype']}-{tile['layout']}-{blocks}x{tile['num_warps']}{flags}"


JOBS = {identify(job): job for job in jobs()}


def compile_all(names):
    """{name: report, or the last lines a worker wrote before it died}."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    waiting, reports = deque(names), {}

    def work(_):
        while True:
            worker = subprocess.Popen(
                [sys.executable, WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            with worker:
                drained = ThreadPoolExecutor(1).submit(worker.stderr.read)
                while waiting:
                    try:
                        name = waiting.popleft()
                    except IndexError:
                        break
                    worker.stdin.write(json.dumps(JOBS[name]) + "\n")
                    worker.stdin.flush()
                    line = worker.stdout.readline()
                    if not line:
                        # The compiler may abort its whole process: the next job gets a new one.
                        reports[name] = drained.result()[-2000:]
                        break
                    reports[name] = json.loads(line)
                else:
                    worker.stdin.close()
                    return

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(work, range(PROCESSES)))
    return reports


@pytest.fixture(scope="module")
def reports(request):
    """Reports of the tests that were selected, compiled together: starting a worker takes seconds."""
    items = (item for item in request.session.items if item.path == request.path)
    return compile_all([item.callspec.params["name"] for item in items if hasattr(item, "callspec")])


@pytest.mark.parametrize("name", JOBS)
def test_launch(name, reports):
    job, report = JOBS[name], reports[name]
    assert isinstance(report, dict), f"the compiler failed:\n{report}"
    assert report["spills"] == 0
    assert report["spill_instructions"] == 0
    assert report["shared_memory"] <= _tiles.SHARED_MEMORY_LIMIT[job["arch"]]

    if job["verb"] == "row_sq_norm":
        return
    if job["dtype"] == "float32":
        assert not re.search(ANY_TENSOR_CORE, report["text"])
    else:
        assert re.search(expected_instruction(job), report["text"])


def expected_instruction(job):
    """The native one, but for Gram tiles of 32 rows: warpgroup MMA and tcgen05 start at 64."""
    if job["verb"] == "gram_norm" and job["tile"]["BLOCK_T"] < 64 and job["arch"] != "gfx942":
        return TENSOR_CORES["sm_80"]
    return TENSOR_CORES[job["arch"]]
