"""Compiles a launch for any target, without a GPU.

`specialize` turns the arguments of a launch into the signature that the just-in-time compiler would see, and
`compile_ahead` compiles it and counts what it uses.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from dpfast.kernels._again import options_of
from dpfast.kernels._tiles import Tile

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch.

    `spills` is bytes of local memory a thread (NVIDIA) or spilled registers plus bytes of scratch (AMD);
    `spill_instructions` counts LDL and STL, or scratch loads and stores. `text` is SASS or AMD assembly; `ptx` is empty
    on AMD.
    """

    ttgir: str
    ptx: str
    text: str
    registers: int
    spills: int
    spill_instructions: int
    shared_memory: int


def specialize(kernel, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """(signature, constexprs, aligned) that the just-in-time compiler derives from `arguments`.

    `aligned` holds names, and (name, i) of what is aligned in a tuple of tensors.
    """
    signature: dict[str, Any] = {}
    constexprs: dict[str, Any] = {}
    aligned: list[Any] = []
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            aligned += [name] * _is_aligned(value)
        elif isinstance(value, tuple):
            signature[name] = tuple(_POINTERS[x.dtype] for x in value)
            aligned += [(name, i) for i, x in enumerate(value) if _is_aligned(x)]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constexprs[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned += [name] * (value % 16 == 0 and not parameter.do_not_specialize)
    return signature, constexprs, aligned


def _is_aligned(tensor: torch.Tensor) -> bool:
    """A meta tensor has no address; the allocator's are multiples of 512."""
    return tensor.storage_offset() * tensor.element_size() % 16 == 0


def compile_ahead(
    kernel, signature: dict[str, Any], constexprs: dict[str, Any], target: GPUTarget, tile: Tile, aligned: list[Any]
) -> Compiled:
    """Compile `kernel` for `target`, which need not be present, and count what it uses.

    `kernel` must be a JITFunction: Triton imported without TRITON_INTERPRET.
    """
    paths = (name if isinstance(name, tuple) else (name,) for name in aligned)
    attributes = {(kernel.arg_names.index(name), *i): [["tt.divisibility", 16]] for name, *i in paths}
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=target, options=options_of(tile))
    report = _amd_report if target.backend == "hip" else _nvidia_report
    return Compiled(
        ttgir=compiled.asm["ttgir"],
        ptx=compiled.asm.get("ptx", ""),
        shared_memory=compiled.metadata.shared,
        **report(compiled.asm),
    )


def _nvidia_report(asm) -> dict[str, Any]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage, sass = (
            subprocess.run([tools / "cuobjdump", option, cubin], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return {
        "text": sass,
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "spills": int(re.search(r"LOCAL:(\d+)", usage).group(1)),
        "spill_instructions": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
    }


def _amd_report(asm) -> dict[str, Any]:
    text = asm["amdgcn"]

    def count(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", text).group(1))

    return {
        "text": text,
        "registers": count("vgpr_count"),
        "spills": count("vgpr_spill_count") + count("sgpr_spill_count") + count("private_segment_fixed_size"),
        "spill_instructions": len(re.findall(r"\bscratch_(?:load|store)", text)),
    }
