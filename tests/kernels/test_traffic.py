"""The bytes that kernels load and store are those of the model in `traffic.issued`.

Twice: counted while the interpreter runs whole launches, ragged and split ones too, and read off what the compiler
makes of the table's rows, every one of sm_90's and the general ones of the other architectures. There the counts stand
in traffic.md beside what they cost in machine instructions, so that a change is made knowingly:

    python tests/kernels/test_traffic.py    # renews traffic.md
"""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from kernel_cases import BF16, DEVICE, FP32, shapes_of_rows
from traffic import Traffic, issued
from triton.runtime import interpreter

from dpfast import kernels
from dpfast.kernels import _launch, _partials, _tiles, grouped_norm

HERE = Path(__file__).parent
TABLE = HERE / "traffic.md"
N, G = 8, 3  # samples of a launch, factors of a grouped one
LARGE = (4096, 4096, 4096)  # T, D, P
ITEMSIZE = {"bfloat16": 2, "float32": 4}


def jobs():
    """{name: job} of each row of sm_90 that aligned shapes take, and of the others' rows of large layers."""
    found = {}
    for (verb, arch, dtype), rows in _tiles.ROWS.items():
        shapes = shapes_of_rows(verb, arch, dtype) if arch != "interpreter" else {}
        for number, row in enumerate(rows):
            if (number, True) not in shapes or (arch != "sm_90" and shapes[number, True] != LARGE):
                continue
            job = {"verb": verb, "arch": arch, "dtype": {"16-bit": "bfloat16", "fp32": "float32"}[dtype]}
            job |= dict(zip("TDP", shapes[number, True], strict=True))
            job |= {"tile": asdict(replace(row.tile, PART=0, source="")), "options": False, "G": 1}
            found[identify(job)] = job
    for arch in _tiles.ARCHES:
        for D, P in ((4096, 8), (16, 2048)):
            tile = grouped_norm.thin_tile(D, P, torch.bfloat16, arch)
            job = {"verb": "grouped_norm", "arch": arch, "dtype": "bfloat16", "T": 1024, "D": D, "P": P, "G": G}
            job["tile"] = asdict(replace(tile, source=""))
            found[identify(job)] = job
    return found


def identify(job):
    tile = job["tile"]
    blocks = "x".join(str(tile[f"BLOCK_{axis}"]) for axis in "TDPK" if tile[f"BLOCK_{axis}"])
    kind = "-flat" if tile["layout"] == "flat" else ""
    sizes = f"({N}, {job['T']}, {job['D']}, {job['P']})"
    return f"{job['arch']} {job['verb']}{kind} {job['dtype']} {sizes} {blocks}"


def count(jobs):
    """{name: what traffic_worker.py says of the job}; two processes, for the two processors of a small machine."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    names = [list(jobs)[i::2] for i in range(2)]

    def work(own):
        lines = "".join(json.dumps(jobs[name]) + "\n" for name in own)
        command = [sys.executable, HERE / "traffic_worker.py"]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return zip(own, map(json.loads, done.stdout.splitlines()), strict=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(pair for half in pool.map(work, names) for pair in half)


def model(job, parts):
    sizes, tile = (N * job["G"], job["T"], job["D"], job["P"]), _tiles.Tile(**job["tile"])
    return issued(job["verb"], *sizes, tile, itemsize=ITEMSIZE[job["dtype"]], splits=parts)


def steps(job, found):
    """How often a program, or all the parts of a tile's reduction together, runs each loop."""
    tile, T, D, P = job["tile"], job["T"], job["D"], job["P"]
    lengths = {"row_sq_norm": [D], "gram_norm": [P, D]}.get(job["verb"], [T])
    if job["verb"] == "weighted_sum":  # its loops count blocks
        lengths = [-(-N * T // tile["BLOCK_T"]) if tile["layout"] == "flat" else N * -(-T // tile["BLOCK_T"])]
    return [-(-length // step) for length, (step, _) in zip(lengths, found["loops"], strict=True)]


def splits(job, found):
    """Into how many parts a weighted sum's launch splits its reduction."""
    if job["verb"] != "weighted_sum":
        return 1
    tiles = -(-job["D"] // job["tile"]["BLOCK_D"]) * -(-job["P"] // job["tile"]["BLOCK_P"])
    assert found["programs"] % tiles == 0
    return found["programs"] // tiles


def total(job, found):
    """What the compiled launch reads and writes."""
    loops = sum(count * read for count, (_, read) in zip(steps(job, found), found["loops"], strict=True))
    read = found["programs"] // splits(job, found) * loops + found["programs"] * found["read"]
    return Traffic(read, found["programs"] * found["written"])


def table(jobs, found):
    yield "# What a program loads and stores"
    yield ""
    yield "Made by `python tests/kernels/test_traffic.py`; the test fails where a kernel differs. A row is a launch:"
    yield f"architecture, kernel, dtype, (N, T, D, P), with {G} factors where it is grouped, and blocks. Bytes are"
    yield "those of Triton's IR before pipelining. *Reuse* is all that the programs ask for over what must move at"
    yield "least, `issued` over `bytes_moved`: the caches' share. *Named* says how often the load instructions of the"
    yield "machine code name a step's bytes: once a stage in flight, and in the loop."
    yield ""
    yield f"Triton {triton.__version__}"
    yield ""
    yield "| launch | programs | bytes a step | steps | stored | reuse | named | loads in the machine code |"
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    for name, job in jobs.items():
        own, verb = found[name], {"grouped_norm": "outer_norm"}.get(job["verb"], job["verb"])
        sizes = (N * job["G"], job["T"], job["D"], job["P"])
        least = _launch.bytes_moved(verb, *sizes, itemsize=ITEMSIZE[job["dtype"]])
        cells = [
            name,
            own["programs"],
            " + ".join(str(read) for _, read in own["loops"]),
            " + ".join(map(str, steps(job, own))),
            own["written"],
            f"{sum(total(job, own)) / least:.1f}",
            f"{own['stages']:.3g}",
            own["loads"],
        ]
        yield f"| {' | '.join(map(str, cells))} |"


class Counter:
    """The interpreter's memory, counting what is asked of it: whole blocks, and the lanes that are not masked."""

    def __init__(self, memory):
        self.memory, self.read, self.written, self.lanes_read, self.lanes_written = memory, 0, 0, 0, 0

    def __getattr__(self, name):  # of what moves nothing
        return getattr(self.memory, name)

    def load(self, addresses, mask, other, dtype):
        size = np.dtype(dtype).itemsize
        self.read, self.lanes_read = self.read + mask.size * size, self.lanes_read + int(mask.sum()) * size
        return self.memory.load(addresses, mask, other, dtype)

    def store(self, addresses, values, mask):
        size = values.dtype.itemsize
        self.written, self.lanes_written = self.written + mask.size * size, self.lanes_written + int(mask.sum()) * size
        return self.memory.store(addresses, values, mask)


@contextlib.contextmanager
def counting():
    counter = Counter(interpreter._interpreter)
    with mock.patch.object(interpreter, "_interpreter", counter):
        yield counter


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter does")
@pytest.mark.parametrize(
    ("T", "D", "P", "dtype", "layout"),
    [
        (40, 48, 80, BF16, "per_sample"),
        (70, 33, 20, FP32, "per_sample"),
        (40, 48, 80, BF16, "flat"),
        (1, 20, 70, BF16, "flat"),
    ],
)
def test_interpreted_launches_move_the_bytes_of_the_model(T, D, P, dtype, layout):
    samples = 3
    a, b = torch.randn(samples, T, D).to(dtype), torch.randn(samples, T, P).to(dtype)
    tile = _tiles.Tile(16, 32, 64, 32, 4, 1, "test", layout)
    tiles = -(-D // 32) * -(-P // 64)
    steps = -(-samples * T // 16) if layout == "flat" else samples * -(-T // 16)
    calls = {"weighted_sum": lambda: kernels.weighted_sum(a, b, torch.ones(samples), tile=tile)}
    if layout == "per_sample":  # what the others do does not depend on it
        for verb in ("outer_product", "outer_norm", "gram_norm"):
            calls[verb] = lambda verb=verb: getattr(kernels, verb)(a, b, tile=tile)
    for verb, call in calls.items():
        with counting() as counter, mock.patch.object(_partials, "launch"):  # without the sum over tiles
            call()
        parts = _tiles.splits(tiles, steps // 4, "interpreter")
        expected = issued(verb, samples, T, D, P, tile, itemsize=dtype.itemsize, splits=parts)
        assert (counter.read, counter.written) == expected, verb
        least = _launch.bytes_moved(verb, samples, T, D, P, itemsize=dtype.itemsize)
        assert counter.lanes_read + counter.lanes_written >= least, verb


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter does")
def test_row_products_cost_one_more_read_of_the_rows():
    samples, T, D, P = 3, 70, 64, 160
    a, b = torch.randn(samples, T, D), torch.randn(samples, T, P)
    tile = _tiles.Tile(16, 32, 64, 32, 4, 1, "test")
    for verb in ("outer_product", "outer_norm"):
        with counting() as counter, mock.patch.object(_partials, "launch"):
            getattr(kernels, verb)(a, b, row_products=True, tile=tile)
        expected = issued(verb, samples, T, D, P, tile, itemsize=4, row_products=True)
        assert (counter.read, counter.written) == expected, verb


JOBS = jobs()


@pytest.fixture(scope="module")
def counted():
    return count(JOBS)


def test_compiled_kernels_move_the_bytes_of_the_model(counted):
    for name, job in JOBS.items():
        assert total(job, counted[name]) == model(job, splits(job, counted[name])), name


def test_machine_code_loads_whole_steps_and_no_more(counted):
    """Load instructions name a step's bytes once a stage in flight and once in the loop, stores all that is stored."""
    checked = {name: JOBS[name] for name, found in counted.items() if found["every_lane_loads"]}
    assert len(checked) >= 0.5 * len(JOBS)
    for name, job in checked.items():
        assert counted[name]["stages"] in range(1, job["tile"]["num_stages"] + 3), name
        assert counted[name]["stored"] >= 1, name


@pytest.mark.skipif(
    f"Triton {triton.__version__}\n" not in TABLE.read_text(), reason="traffic.md is of another version of the compiler"
)
def test_traffic_is_as_published(counted):
    assert TABLE.read_text() == "\n".join(table(JOBS, counted)) + "\n", (
        "if so meant: python tests/kernels/test_traffic.py"
    )


if __name__ == "__main__":
    TABLE.write_text("\n".join(table(JOBS, count(JOBS))) + "\n")
