"""What the compiler makes of every launch, for GPUs that are not here.

For each row of the tile table and each of its architectures: it compiles, nothing spills but what was measured to be
quicker so (spill instructions are counted: with LOCAL:0 a kernel may still have some), shared memory and registers fit,
16-bit inputs go to the architecture's own tensor-core instruction and fp32 to none that rounds to TF32. Where rows are
read through pointers, the main loop copies both operands to shared memory asynchronously and holds none of them in
registers. What a lane gets from another one is never the addend of a product.
"""

import json
import os
import re
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from kernel_cases import shapes_of_rows
from listings import contracted_sums, copied_bytes, main_loop

from dpfast.kernels import _tiles

WORKER = Path(__file__).with_name("ahead_worker.py")
PROCESSES = 2
LARGE = (4096, 4096, 4096)  # T, D, P
HEAD = (1024, 768, 50257)  # GPT-2's, whose rows are copied to multiples of 16

HAS_HEADS = ("outer_product", "gram_norm", "weighted_sum")
TENSOR_CORES = {"sm_80": r"\bHMMA", "sm_90": r"\bHGMMA", "sm_100": r"\bUTC\w*MMA", "gfx942": r"\bv_mfma"}
ANY_TENSOR_CORE = r"\b(?:HMMA|HGMMA|UTC\w*MMA|v_mfma\w*xf32)"


# What stands for a row's dtype: fp16 compiles as bf16 does, but for the parts of a flat weighted sum.
DTYPES = {("16-bit", "per_sample"): "bfloat16", ("16-bit", "flat"): "float16", ("fp32", "per_sample"): "float32"}
DTYPES["fp32", "flat"] = "float32"


def jobs():
    """Every row, on a shape whose rows are multiples of 16 and on one whose are not, where it is for both.

    Rows that load through descriptors are compiled with pointers too, which strides may ask for, and those that aligned
    shapes never take on odd multiples of 8, which descriptors take as well. Direct norms share the kernel of outer
    products, whose launches do more: once a row is enough. The first row of a verb is also compiled without options.
    """
    for (verb, arch, dtype), rows in _tiles.ROWS.items():
        if arch == "interpreter":
            continue
        shapes = shapes_of_rows(verb, arch, dtype)
        for number, row in enumerate(rows):
            tile, name = row.tile, DTYPES[dtype, row.tile.layout]
            variants = [
                (replace(tile, TMA=tma), shapes[number, aligned])
                for aligned in (True, False)
                for tma in ((True, False) if tile.TMA and aligned else (False,))
                if (number, aligned) in shapes
            ]
            if tile.TMA and (number, True) not in shapes:
                T, D, P = shapes[number, False]
                variants.append((tile, (T, D // 16 * 16 + 8, P // 16 * 16 + 8)))
            for tile, shape in variants[:1] if verb == "outer_norm" else variants:
                yield job(verb, name, arch, tile, shape)
            if number == 0 and verb != "row_sq_norm":
                yield job(verb, name, arch, *variants[0], options=False)
            # Runs of rows: the rows of large layers, and on one architecture others.
            large = shapes.get((number, True)) == LARGE and (dtype == "16-bit" or arch == "sm_90")
            by_element = number == len(rows) - 1 and arch == "sm_90"
            if (large or by_element) and verb in ("outer_product", "gram_norm"):
                yield job(verb, name, arch, replace(tile, TMA=False), variants[0][1], runs=True)
            if row is row_of(rows, *(-(-size // 16) * 16 for size in HEAD)) and dtype == "16-bit" and verb in HAS_HEADS:
                for tma in {tile.TMA, False}:
                    yield job(verb, name, arch, replace(tile, TMA=tma), HEAD)


def row_of(rows, T, D, P):
    return next(row for row in rows if row.fits(T, D, P))


def job(verb, dtype, arch, tile, shape, *, options=True, runs=False):
    T, D, P = shape
    described = {"verb": verb, "T": T, "D": D, "P": P, "dtype": dtype, "arch": arch, "options": options, "runs": runs}
    return described | {"tile": asdict(tile) | {"source": "", "PART": 0}}


def identify(job):
    tile = job["tile"]
    blocks = "x".join(str(tile[f"BLOCK_{axis}"]) for axis in "TDPK" if tile[f"BLOCK_{axis}"])
    chained = max(job["D"], job["P"]) if job["verb"] == "gram_norm" else job["T"]
    flags = [
        tile["layout"] == "flat" and "flat",
        tile["TMA"] and "tma",
        job["D"] % 16 and "unaligned",
        (job["T"], job["D"], job["P"]) == HEAD and "copied",
        chained > _tiles.CHAIN and "chained",
        not job["options"] and "plain",
        job["runs"] and "runs",
    ]
    words = [job["arch"], job["verb"], job["dtype"], f"{blocks}x{tile['num_warps']}w{tile['num_stages']}s"]
    return "-".join(words + [flag for flag in flags if flag])


# By what is compiled: rows with the same tile and flags share a job.
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


# Tiles that spill a few registers and were the quickest all the same, on the machine that their row names.
MEASURED = {("sm_90", "weighted_sum", 64, 256, 128): 96}


@pytest.fixture(scope="module")
def reports(request):
    """Reports of the tests that were selected, compiled together: starting a worker takes seconds."""
    items = (item for item in request.session.items if item.path == request.path)
    return compile_all([item.callspec.params["name"] for item in items if hasattr(item, "callspec")])


@pytest.mark.parametrize("name", JOBS)
def test_launch(name, reports):
    job, report = JOBS[name], reports[name]
    assert isinstance(report, dict), f"the compiler failed:\n{report}"
    tile = job["tile"]
    few = MEASURED.get((job["arch"], job["verb"], tile["BLOCK_T"], tile["BLOCK_D"], tile["BLOCK_P"]), 0)
    assert max(report["spills"], report["spill_instructions"]) <= few
    assert report["shared_memory"] <= _tiles.SHARED_MEMORY_LIMIT[job["arch"]]
    if job["arch"] != "gfx942":
        assert 32 * job["tile"]["num_warps"] * -(-report["registers"] // 8) * 8 <= 2**16
        # Loads through descriptors where the row says so, and nowhere else.
        assert ("UTMALDG" in report["text"]) == job["tile"]["TMA"]

    assert contracted_sums(report["text"], "amdgcn" if job["arch"] == "gfx942" else "sass") == []
    assert contracted_sums(report["ptx"], "ptx") == []

    if job["verb"] == "row_sq_norm":
        return
    if copies(job):
        tile = job["tile"]
        loop = main_loop(report["ptx"])
        step = tile["BLOCK_T"] * (tile["BLOCK_D"] + tile["BLOCK_P"]) * (4 if job["dtype"] == "float32" else 2)
        assert 32 * tile["num_warps"] * copied_bytes(loop) >= step
        assert "ld.global" not in loop
        if tile["layout"] == "per_sample":  # a flat sum's weighted operand is made in registers
            assert "st.shared" not in loop
            assert loop.count("bar.sync") <= 2
    if job["dtype"] == "float32":
        assert not re.search(ANY_TENSOR_CORE, report["text"])
    else:
        assert re.search(expected_instruction(job), report["text"])


def copies(job):
    """Whether both operands of a step are for cp.async, which copies 4 bytes at least: rows are even."""
    by_pointers = job["arch"] != "gfx942" and not job["tile"]["TMA"] and job["verb"] != "gram_norm"
    return by_pointers and (
        job["dtype"] == "float32" or job["D"] % 16 == job["P"] % 16 == 0 or (job["T"], job["D"], job["P"]) == HEAD
    )


def expected_instruction(job):
    """The native one, but for Gram tiles of 32 rows: warpgroup MMA and tcgen05 start at 64."""
    if job["verb"] == "gram_norm" and job["tile"]["BLOCK_T"] < 64 and job["arch"] != "gfx942":
        return TENSOR_CORES["sm_80"]
    return TENSOR_CORES[job["arch"]]
