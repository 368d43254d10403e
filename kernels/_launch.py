"""How kernels are launched, and what a launch costs. `launch` is the only place that starts one."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch
import triton

from . import _tiles
from ._again import options_of, start
from ._repeat import noted
from ._tiles import Tile


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
        kernel[(programs,)](**arguments, **options_of(tile))
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
