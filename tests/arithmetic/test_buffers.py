"""Blocks are used again when, and only when, no tensor stands on them."""

import os
import subprocess
import sys

import pytest
import torch
from memory import resident
from torch._subclasses.fake_tensor import FakeTensorMode

from dpfast.arithmetic import buffers

pytestmark = pytest.mark.on_cpu

CPU = torch.device("cpu")
LARGE = (buffers.SMALLEST // 4 + 1,)


def in_a_process_of_its_own(program: str, *arguments: str) -> str:
    """What ``program`` prints, with the C library's allocator as it comes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    command, here = [sys.executable, "-c", program, *arguments], os.path.dirname(__file__)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _no_blocks():
    buffers.release()
    before = len(buffers._blocks)
    yield
    buffers.release()
    assert len(buffers._blocks) == before


def test_a_block_is_used_again_once_its_tensor_is_gone():
    x = buffers.empty(LARGE, torch.float32, CPU)
    place = x.data_ptr()
    del x
    assert buffers.empty(LARGE, torch.float32, CPU).data_ptr() == place


def test_a_view_keeps_the_block():
    x = buffers.empty((2, *LARGE), torch.float32, CPU).fill_(1.0)
    view = x.detach()[1:]
    del x
    y = buffers.empty((2, *LARGE), torch.float32, CPU).fill_(2.0)
    assert (view == 1.0).all() and (y == 2.0).all()


def test_batches_that_grow_do_not_pile_up_blocks():
    before = len(buffers._blocks)
    for n in range(1, 40):
        tensors = [buffers.empty((n, *LARGE), torch.float32, CPU) for _ in range(3)]
        assert len(buffers._blocks) - before <= 3
        assert len({x.data_ptr() for x in tensors}) == 3
        del tensors


def test_sizes_that_take_turns_keep_their_blocks(monkeypatch):
    """As layers do whose gradients are copied away one by one."""
    sizes = [(16, *LARGE), (3, *LARGE), (16, *LARGE), (9, *LARGE)]
    for n in sizes:
        buffers.empty(n, torch.float32, CPU)
    monkeypatch.setattr(buffers, "_new_block", None)
    for _ in range(3):
        for n in sizes:
            buffers.empty(n, torch.float32, CPU)


def test_idle_blocks_are_given_back_in_the_end():
    before = sum(map(len, buffers._blocks))
    for n, together in ((100, 1), (33, 3), (11, 9), (3, 33), (100, 1)):
        in_use = [buffers.empty((n, *LARGE), torch.float32, CPU) for _ in range(together)]
        assert sum(map(len, buffers._blocks)) - before <= 2 * buffers._HEADROOM * 100 * in_use[0][0].nbytes
        del in_use


def test_idle_blocks_make_room_where_memory_is_short(monkeypatch):
    new_block, others = buffers._new_block, len(buffers._blocks)

    def short_of_memory(size):
        if len(buffers._blocks) > others:
            raise MemoryError("no room")
        return new_block(size)

    buffers.empty(LARGE, torch.float32, CPU)
    monkeypatch.setattr(buffers, "_new_block", short_of_memory)
    x = buffers.empty((9, *LARGE), torch.float32, CPU)
    with pytest.raises(MemoryError):
        buffers.empty(LARGE, torch.float32, CPU)
    assert x.fill_(1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 5), (2, 1024, 1024)])
def test_shapes_and_dtypes(shape, dtype):
    x = buffers.empty(shape, dtype, CPU)
    assert x.shape == torch.Size(shape) and x.dtype == dtype and x.is_contiguous()


@pytest.mark.skipif(buffers._malloc_trim() is None, reason="the C library is not glibc")
def test_what_is_free_is_given_back():
    """Also where something stands behind it, so that it would not go back by itself."""
    many = [torch.ones(2**14) for _ in range(2000)]  # 64 KB each, below what glibc maps by itself
    behind = torch.ones(2**10)
    before = resident("VmRSS")
    many.clear()
    buffers.give_back()
    assert before - resident("VmRSS") >= 100 * 2**20 and behind.sum() == 2**10


def test_a_place_for_others_is_fp32_on_the_cpu_whatever_the_default_is():
    before, like = torch.get_default_dtype(), torch.zeros(3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            place = buffers.place_for_others(513, 512, like)
    finally:
        torch.set_default_dtype(before)
    assert (place.shape, place.dtype, place.device.type) == ((513, 512), torch.float32, "cpu")
    assert place.untyped_storage().nbytes() >= place.nbytes + 64 and place.is_contiguous()
    assert place.data_ptr() % 64 == 0
    assert buffers.place_for_others(512, 512, like) is None
    assert buffers.place_for_others(513, 512, like.double()) is None
    assert buffers.place_for_others(513, 512, torch.zeros(3, device="meta")) is None
    with FakeTensorMode() as fake:
        assert buffers.place_for_others(513, 512, fake.from_tensor(like)) is None


PLACES = """
import ctypes
import torch
from dpfast.arithmetic import buffers

like, rows = torch.zeros(3), 1201
torch.empty(2**22)  # freed, it has glibc take what is smaller from the heap

def of_torch():
    return torch.empty(rows, 1024)

malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
places = [buffers.place_for_others(rows, 1024, like) for _ in range(9)]
for take in (lambda: buffers.place_for_others(rows, 1024, like), of_torch):
    for size in range(304, 16, -16):
        small = [malloc(size) for _ in range(200)]  # in what is left between them, to stay
    before = sorted(x.data_ptr() for x in places[1:8:2])
    places[1:8:2] = [None] * 4
    places[1:8:2] = [take() for _ in range(4)]
    after = sorted(x.data_ptr() for x in places[1:8:2])
    assert all(abs(x - y) <= 512 for x, y in zip(before, after, strict=True)), (take, before, after)
"""


@pytest.mark.skipif(buffers._malloc_trim() is None, reason="the C library is not glibc")
def test_a_place_is_taken_by_the_next_one_and_by_a_tensor_of_its_size():
    """Where memory in use stands on both sides. A tensor of torch's does not find its own place again. In a process of
    its own: what others have left on the heap may fit as well."""
    in_a_process_of_its_own(PLACES)


def test_a_place_outlives_what_has_made_it():
    place = buffers.place_for_others(513, 512, torch.zeros(3)).fill_(3.0)
    view, others = place[100:].t(), []
    del place
    for _ in range(5):
        others.append(buffers.place_for_others(513, 512, torch.zeros(3)).fill_(4.0))
    assert bool((view == 3.0).all())


FAULTS = """
import platform, resource, sys
import torch
from torch import nn
import dpfast

def step():
    some = [torch.ones(2**21) for _ in range(6)]  # 8 MB each, as a small network's activations

def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if "wrapped" in sys.argv:
    dpfast.GradSampleModuleFastGradientClipping(nn.Linear(2, 2))
print(platform.libc_ver()[0], faults())
"""


def test_memory_that_is_free_at_the_end_of_the_heap_is_kept():
    """In processes of their own, which have freed nothing large."""
    counts = []
    for how in ("plain", "wrapped"):
        library, faults = in_a_process_of_its_own(FAULTS, how).split()
        if library != "glibc":
            pytest.skip("about glibc")
        counts.append(int(faults))
    assert 10 * counts[1] <= max(1000, counts[0]), "48 MB are 12,000 pages, three times; few where pages are huge"
