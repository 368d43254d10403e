"""Counts the memory operations of compiled kernels, for GPUs that are not here; as ahead_worker.py.

    python traffic_worker.py < jobs.jsonl > counts.jsonl

Of Triton's IR before pipelining: the bytes of each loop's loads a step, and those outside of loops. Of the machine
code: how many bytes its load instructions name for a whole program, however often a loop runs them.
"""

import json
import math
import os
import re
import sys
from collections import Counter
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import ahead_worker
import torch
import triton
from ahead import TARGETS, compile_ahead, specialize

import dpfast.kernels
from dpfast.kernels import _tiles

BYTES = {"bf16": 2, "f16": 2, "f32": 4}
# Bytes of one lane of a machine instruction, by its suffix.
NVIDIA = {".128": 16, ".64": 8, "": 4, ".U16": 2, ".S16": 2, ".U8": 1}
AMD = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short_d16": 2, "short_d16_hi": 2}


def record(job):
    if job["verb"] != "grouped_norm":
        return ahead_worker.record(job, _tiles.Tile(**job["tile"]))
    dtype = getattr(torch, job["dtype"])
    a, b = ([torch.empty((8, job["T"], job[size]), dtype=dtype, device="meta")] * job["G"] for size in "DP")
    with ahead_worker.recording(job["arch"]) as launches:
        dpfast.kernels.grouped_outer_norm(a, b)
    return launches[0]


def count_ir(ttir):
    """(loops, read, written, blocks) of the IR.

    `loops` has [step, bytes read a step] of each loop, `read` and `written` what is outside of them, `blocks` the bytes
    and the bytes of a row of each load of rows. MLIR indents a region: a line that stands no deeper than a loop's head
    is outside of it.
    """
    loops, inside, read, written, blocks = [], [], 0, 0, []
    for line in ttir.splitlines():
        depth = len(line) - len(line.lstrip())
        inside = [(head, loop) for head, loop in inside if depth > head]
        if "scf.for" in line:
            loops.append([int(re.search(r"step %c(\d+)_i", line).group(1)), 0])
            inside.append((depth, loops[-1]))
        elif re.search(r"\btt\.(?:load|descriptor_load)\b", line):
            shape, loaded = block(line)
            if len(shape) > 1:
                blocks.append((loaded, loaded // math.prod(shape[:-1])))
            if inside:
                inside[-1][1][1] += loaded
            else:
                read += loaded
        elif re.search(r"\btt\.(?:store|descriptor_store|atomic\w*)\b", line):
            assert not inside, "a store in a loop"
            written += block(line)[1]
    return loops, read, written, blocks


def block(line):
    """(shape, bytes) of what a line of the IR loads or stores: of the last type it names."""
    shape, dtype = re.findall(r"((?:\d+x)*)(?:!tt\.ptr<)?(bf16|f16|f32)>", line)[-1]
    shape = [int(n) for n in shape.split("x") if n]
    return shape, math.prod(shape) * BYTES[dtype]


def count_machine(text, arch):
    """(bytes a lane loads, bytes it stores, descriptor loads, loads by kind), each instruction counted once.

    Loads of up to 4 bytes a lane count nothing: in code for aligned rows they are scalars and clip factors, which one
    lane, or several alike, ask for.
    """
    loads, stores = Counter(), Counter()
    if arch.startswith("gfx"):
        for kind, name in re.findall(r"\b(?:global|buffer)_(load|store)_(\w+)", text):
            (loads if kind == "load" else stores)[name, AMD[name]] += 1
    else:
        for name, suffixes in re.findall(r"\b(LDGSTS|LDG|STG)\b((?:\.\w+)*)", text):
            width = next((s for s in NVIDIA if s and s in re.findall(r"\.\w+", suffixes)), "")
            (stores if name == "STG" else loads)[name + width, NVIDIA[width]] += 1
    descriptors = len(re.findall(r"\bUTMALDG", text))
    names = [f"{n} {name}" for (name, _), n in sorted(loads.items())] + [f"{descriptors} UTMALDG"] * (descriptors > 0)
    loaded = sum(n * width for (_, width), n in loads.items() if width > 4)
    stored = sum(n * width for (_, width), n in stores.items())
    return loaded, stored, descriptors, ", ".join(names)


def count(job):
    kernel, arguments, tile, programs = record(job)
    signature, constexprs, aligned = specialize(kernel, arguments)
    target = TARGETS[job["arch"]]
    compiled, compile_ = [], triton.compile
    with mock.patch.object(triton, "compile", lambda *a, **k: compiled.append(compile_(*a, **k)) or compiled[0]):
        report = compile_ahead(kernel, signature, constexprs, target, tile, aligned)
    loops, read, written, blocks = count_ir(compiled[0].asm["ttir"])
    lane_loads, lane_stores, descriptors, loads = count_machine(report.text, job["arch"])
    threads = tile.num_warps * target.warp_size
    step = sum(bytes_ for bytes_, _ in blocks)
    # A descriptor's block goes in boxes of at most 128 bytes a row, and an instruction has one for each warp.
    instructions = sum(math.ceil(row / 128 / tile.num_warps) for _, row in blocks)
    return {
        "programs": programs,
        "loops": loops,
        "read": read,
        "written": written,
        "loads": loads,
        # How many times over the instructions name the blocks of the IR, and its stores.
        "stages": descriptors / instructions + lane_loads * threads / step,
        "stored": lane_stores * threads / written,
        # Smaller blocks leave lanes without work of their own.
        "every_lane_loads": bool(descriptors) or min(blocks)[0] >= 8 * threads,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(count(json.loads(line))), flush=True)
