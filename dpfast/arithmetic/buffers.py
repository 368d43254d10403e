"""Memory for large results on the CPU, used again from step to step.

The C allocator gives large blocks back to the operating system as soon as they are free, and the next step pays a
page fault for every 4 KB that it writes, a good part of the time of the products that write per-sample gradients. A
GPU's tensors need none of this: PyTorch's caching allocator does the same.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpfast.arithmetic.tracing import is_traced

SMALLEST = 2**20
"""Results of more bytes get a block of their own; the C allocator keeps smaller ones itself."""

_HEADROOM = 1.125  # batches of Poisson sampling differ in size

_blocks: list[mmap.mmap] = []  # least recently used first
_most = 0  # bytes that were in use at one time
_lock = threading.Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty``; large CPU tensors stand on a block that no living tensor uses."""
    numel = math.prod(shape)
    if numel * dtype.itemsize <= SMALLEST or device.type != "cpu" or is_traced():
        return torch.empty(shape, dtype=dtype, device=device)
    with _lock:
        # The tensor's storage holds a reference to the block for as long as any view of it lives.
        return torch.frombuffer(_block(numel * dtype.itemsize), dtype=dtype, count=numel).view(shape)


def place_for_others(rows: int, columns: int, like: Tensor) -> Tensor | None:
    """Empty memory, (rows, columns), that stands where another one of that size has stood, and where one of torch's own
    can stand after it: glibc looks for aligned memory where that, the alignment and a little more fit, so it passes by
    a place that a tensor of the same size has left, and takes more from the operating system. This is asked for without
    alignment, larger than need be, and aligned within. None where that is no matter: of what is small, or no fp32 on a
    CPU.
    """
    numbers = rows * columns
    if numbers <= _LARGE or like.dtype is not torch.float32 or not like.is_cpu:
        return None
    if isinstance(like, FakeTensor) or is_traced():
        return None
    memory = _new_memory(None, numbers * like.itemsize + _ROOM)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _ALIGNMENT
    # The tensor's storage holds a reference to it.
    return torch.frombuffer(memory, dtype=torch.float32, offset=start)[:numbers].view(rows, columns)


_LARGE = SMALLEST // 4
"""Numbers."""

_ALIGNMENT = 64
"""Bytes: torch's own."""

_ROOM = 512
"""Bytes: the alignment, here and where torch asks for it, and glibc's smallest piece are less."""


_new_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
"""``(None, size)``: a bytearray by the C library's ``malloc``, not written to. Python's own ways write zeros."""


def _block(size: int) -> mmap.mmap:
    """An idle block of ``size`` to ``2·size`` bytes, or a new one. A new one takes the place of an idle block that has
    become a little too small (batches grow), or of those that have been idle longest where all together would be more
    than twice what was in use at one time."""
    global _most
    best, length = None, 2 * size + 1
    for i, held in enumerate(map(len, _blocks)):  # the smallest that fits, the first of several
        if size <= held < length and _is_idle(i):
            best, length = i, held
    if best is not None:
        block = _blocks.pop(best)
    else:
        idle = [i for i in range(len(_blocks)) if _is_idle(i)]
        wanted, held = int(size * _HEADROOM), sum(map(len, _blocks))
        _most = max(_most, held - sum(len(_blocks[i]) for i in idle) + wanted)
        leaving = [i for i in idle if size <= 2 * len(_blocks[i]) < 2 * size][:1]
        if not leaving:
            for i in idle:
                if held + wanted <= 2 * _most:
                    break
                held -= len(_blocks[i])
                leaving.append(i)
        for i in reversed(leaving):
            del _blocks[i]
        try:
            block = _new_block(wanted)
        except MemoryError:
            _drop_idle()
            block = _new_block(wanted)
    _blocks.append(block)
    return block


def _is_idle(i: int) -> bool:
    return sys.getrefcount(_blocks[i]) <= _REFERENCES_WHEN_IDLE


def _new_block(size: int) -> mmap.mmap:
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            return mmap.mmap(-1, size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"dpfast cannot allocate memory for {size} bytes of per-sample gradients") from error


def _references_of_a_list_item() -> int:
    """The list's reference and the argument's; asked, because it is the interpreter's business how many that is."""
    probe = [mmap.mmap(-1, 1)]
    return sys.getrefcount(probe[0])


_REFERENCES_WHEN_IDLE = _references_of_a_list_item()


def release() -> None:
    """Gives all idle blocks back to the operating system."""
    global _most
    with _lock:
        _most = 0
        _drop_idle()


def give_back() -> None:
    """Has glibc give what is free now back to the operating system, where it is there: after what took more memory than
    is wanted again soon. It keeps it otherwise, and pieces of it that others stand between for good."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def keep_what_is_free() -> None:
    """Has glibc keep up to 64 MB that are free at the end of its heap, as it does in every process that has once freed
    a block of 32 MB: a block that is freed, unwritten, here. By itself it keeps twice the largest block, and so gives
    back the activations of a small model at the end of each step, for whose memory the next step pays page faults, a
    third of its time. Where the environment says what is kept, or another allocator is there, nothing changes."""
    _new_memory(None, 2**25 - 2**14)  # what is mapped is whole pages, and may be 32 MiB


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return None


def _drop_idle() -> None:
    for i in reversed(range(len(_blocks))):
        if _is_idle(i):
            del _blocks[i]
