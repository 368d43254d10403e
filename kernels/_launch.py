"""How kernels are launched, what a launch costs, and how to compile one without a GPU.

`launch` is the only place that starts a kernel; `specialize` turns the arguments of such a launch into
the signature that the just-in-time compiler would see, and `compile_ahead` compiles it for any target.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _tiles
from ._again import start
from ._repeat import noted
from ._tiles import Tile

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


def arch_of(tensor: torch.Tensor) -> str:
    """The architecture a kernel on `tensor` runs on: "sm_90", "gfx942" or, on the CPU, "interpreter"."""
    return _arch(tensor.device) if tensor.is_cuda else "interpreter"


@cache
def _arch(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def promote(activations: torch.Tensor, backprops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair in one dtype, in which its products are taken: a mixed pair in fp32 copies.

    Not tile by tile in the kernel: for sm_100, Triton 3.7.1 lowers an IEEE dot to TF32 tensor cores where
    an operand was loaded in 16 bits.
    """
    if activations.dtype == backprops.dtype:
        return activations, backprops
    # Contiguous: of windows, whose strides tie, a copy would not keep the last one's 1.
    a, b = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (activations, backprops))
    return a, b


def run_class(verb: str, T: int, D: int, P: int, dtype: torch.dtype, device: torch.device) -> Hashable:
    """`_tiles.run_class` of kernels on `device`."""
    arch = _arch(device) if device.type == "cuda" else "interpreter"
    return _tiles.run_class(verb, T, D, P, dtype, arch)


def widens(kernel) -> bool:
    """Whether `kernel` converts its tiles to float32 before a dot: in the interpreter only.

    The interpreter's dot multiplies the raw bits of bfloat16 (Triton 3.7.1). The kernel is asked, not the
    environment: it knows how it was made.
    """
    return not isinstance(kernel, triton.JITFunction)


def validate(*tensors: torch.Tensor) -> None:
    """Raise ValueError where a kernel would read wrong numbers: dtype, dims, device or layout."""
    for tensor in tensors:
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"kernels take bfloat16, float16 and float32, not {tensor.dtype}")
        if tensor.dim() != 3:
            raise ValueError(f"kernels take (N, T, features), not {tuple(tensor.shape)}")
        if tensor.numel() and tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(f"the last dim must have stride 1, not {tensor.stride(2)}")
        if tensor.shape[:2] != tensors[0].shape[:2]:
            raise ValueError(f"N and T differ: {tuple(tensors[0].shape)} and {tuple(tensor.shape)}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"devices differ: {tensors[0].device} and {tensor.device}")


def launch(kernel, programs: int, tile: Tile, device: torch.device, **arguments) -> None:
    """Start `programs` programs of `kernel` on `device`, on its current stream.

    One grid axis only: the first may be 2³¹-1 long, the others end at 65535.
    """
    if device.type != "cuda":
        kernel[(programs,)](**arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)
    elif device.index == torch.cuda.current_device():
        start(kernel, programs, tile, device.index, arguments)
    else:
        with torch.cuda.device(device):
            start(kernel, programs, tile, device.index, arguments)
    noted(kernel, programs, tile, arguments)


# -- cost ----------------------------------------------------------------------------------------------


def flops(verb: str, N: int, T: int, D: int, P: int, *, block_t: int = 1) -> int:
    """FLOPs of one launch, a multiply-add counting 2, of the problem and not of masked lanes.

    A Gram norm computes the lower triangle in tiles of `block_t` positions; diagonal tiles are whole.
    """
    if verb == "row_sq_norm":
        return 2 * N * T * D
    if verb == "lookup_norm":  # a sum and a square of each
        return 3 * N * T * D
    if verb in ("outer_product", "outer_norm", "weighted_sum"):
        return 2 * N * T * D * P
    if verb == "gram_norm":
        full, rest = divmod(T, block_t)
        entries = (T * T + full * block_t**2 + rest**2) // 2
        return 2 * N * entries * (D + P)
    raise ValueError(f"no verb {verb!r}")


def bytes_moved(verb: str, N: int, T: int, D: int, P: int, *, itemsize: int = 2, out_itemsize: int = 4) -> int:
    """Bytes a launch must move at least: every input read once, every output written once.

    Partial norms are left out: they are 4 bytes a tile.
    """
    if verb == "row_sq_norm":
        return N * T * D * itemsize + 4 * N * T
    if verb == "lookup_norm":  # 8 bytes an index
        return N * T * (D * itemsize + 8) + 4 * N
    read = N * T * (D + P) * itemsize
    if verb == "outer_product":
        return read + N * D * P * out_itemsize
    if verb in ("outer_norm", "gram_norm"):
        return read + 4 * N
    if verb == "weighted_sum":
        return read + 4 * N + D * P * out_itemsize
    raise ValueError(f"no verb {verb!r}")


class Traffic(NamedTuple):
    """Bytes that the programs of a launch ask for, a block counting whole where its lanes are masked."""

    read: int
    written: int


def issued(
    verb: str,
    N: int,
    T: int,
    D: int,
    P: int,
    tile: Tile,
    *,
    itemsize: int = 2,
    splits: int = 1,
    row_products: bool = False,
) -> Traffic:
    """What one launch loads and stores, without bias and bounds: `bytes_moved`, times what its tile reads again.

    An outer product with row products reads each row once more, if sizes allow loads of 16 bytes; where T is not split.

    Every program loads each block of its operands once; what several programs load, the caches may serve. A result is
    fp32. `splits` is the number of parts of a weighted sum's reduction. A grouped norm's wide operand goes by BLOCK_D.
    tests/kernels/test_traffic.py holds this against what the compiler made of the kernels.
    """
    T_, D_, P_, K_ = tile.BLOCK_T, tile.BLOCK_D, tile.BLOCK_P, tile.BLOCK_K
    if verb == "row_sq_norm":
        rows = _ceil(N * T, T_)
        return Traffic(rows * _ceil(D, D_) * itemsize, 4 * rows)
    if verb == "gram_norm":
        blocks = _ceil(T, T_) // T_
        pairs = N * blocks * (blocks + 1) // 2
        return Traffic(pairs * 2 * T_ * (_ceil(D, K_) + _ceil(P, K_)) * itemsize, 4 * pairs)
    if verb == "grouped_norm":
        tiles = N * _ceil(max(D, P), D_) // D_
        return Traffic(tiles * _ceil(T, T_) * (D_ + P_) * itemsize, 8 * tiles)
    tiles = _ceil(D, D_) // D_ * (_ceil(P, P_) // P_)
    if row_products:
        sums = issued(verb, N, T, D, P, tile, itemsize=itemsize)
        read = N * _ceil(T, T_) * (_ceil(D, D_) + _ceil(P, P_)) * itemsize
        return Traffic(sums.read + read, sums.written + N * _ceil(T, T_) // T_ * 4)
    if verb == "outer_product":
        return Traffic(N * tiles * _ceil(T, T_) * (D_ + P_) * itemsize, N * tiles * D_ * P_ * 4)
    if verb == "outer_norm":
        return Traffic(N * tiles * _ceil(T, T_) * (D_ + P_) * itemsize, N * tiles * 4)
    if verb == "weighted_sum":
        flat = tile.layout == "flat"
        rows = _ceil(N * T, T_) if flat else N * _ceil(T, T_)
        factors = rows if flat else rows // T_
        return Traffic(tiles * (rows * (D_ + P_) * itemsize + 4 * factors), splits * tiles * D_ * P_ * 4)
    raise ValueError(f"no verb {verb!r}")


def _ceil(size: int, block: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // block) * block


# -- ahead of time -------------------------------------------------------------------------------------


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
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(source, target=target, options=options)
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
