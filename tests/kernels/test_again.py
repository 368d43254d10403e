"""A launch goes by a key of ours only where Triton would have found the same compiled kernel for it.

No GPU and no interpreter is needed: Triton's own launch runs to the driver's call, which a driver of the test's notes.
"""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
import triton.language as tl
from hypothesis import given
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter, jit
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import dpfast.kernels
from dpfast.kernels import _again
from dpfast.kernels._tiles import Tile

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not _again._KNOWN, reason="this Triton's launches all go Triton's way"),
]

TILE = Tile(16, 16, 16, 16, 4, 1, "a test's")


class Driver:
    """Triton's driver of an sm_90 that is not there: what `JITFunction.run` asks of one."""

    def __init__(self):
        self.started = started = []
        self.stream = 7

        class Launcher:
            def __init__(self, source, metadata):
                pass

            def __call__(self, *arguments):
                started.append((self, arguments))

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17},
            load_binary=lambda name, kernel, shared, device: (name, kernel, 0, 0, 1024),
            unload_module=lambda module: None,  # from Triton 3.8 on, when a compiled kernel goes
        )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return self.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="module")
def gpu():
    before = driver._active
    driver.set_active(Driver())
    yield driver.active
    driver.set_active(before)


@pytest.fixture
def none_kept(monkeypatch):
    monkeypatch.setattr(_again, "_compiled", {})
    monkeypatch.setattr(_again, "_places", {})


def copied(x_ptr, out_ptr, stride, T, N, scale, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs * stride, mask=offs < T) * scale, mask=offs < N)


@pytest.fixture
def kernel(gpu, none_kept, compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else it may be none that is compiled here
    return JITFunction(copied, do_not_specialize=["T"])


def arguments(**changed):
    x, out = torch.zeros(64), torch.zeros(64)
    return {"x_ptr": x, "out_ptr": out, "stride": 16, "T": 5, "N": 5, "scale": 1.0, "BLOCK": 16, **changed}


def theirs(kernel, tile, values):
    """Triton's key, which its tables know compiled kernels by."""
    _, keys, _, _, bind = kernel.device_caches[0]
    # As `JITFunction.run` passes them on; the last one is of Triton 3.9.
    around = {"debug": kernel.debug or knobs.runtime.debug}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(knobs.compilation, name):
            around[name] = getattr(knobs.compilation, name)
    _, specialization, options = bind(**values, **_again.options_of(tile), **around)
    return jit.compute_cache_key(keys, specialization, options)


# -- keys ----------------------------------------------------------------------------------------------

STORAGE = torch.zeros(4096, dtype=torch.uint8)
DTYPES = (torch.bfloat16, torch.float32, torch.int64)


def tensor(dtype, start, count):
    return STORAGE.view(dtype)[start : start + count]


def descriptor(dtype, t, block, padding):
    x = STORAGE.view(dtype)[: 16 * t].view(1, t, 16)
    return TensorDescriptor(x, [1, t, 16], [16 * t, 16, 1], [1, *block], padding)


tensors = st.builds(tensor, st.sampled_from(DTYPES), st.integers(0, 9), st.integers(0, 3))
descriptors = st.builds(
    descriptor,
    st.sampled_from(DTYPES[:2]),
    st.integers(1, 4),
    st.tuples(st.sampled_from((8, 16)), st.sampled_from((8, 16))),
    st.sampled_from(("zero", "nan")),
)
# Around what integers are specialised on, and numbers that are equal to others of another type.
edges = st.sampled_from(
    [0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, -1, -16, -(2**31), -(2**31) - 16, 2**62]
)
numbers = st.one_of(edges, st.integers(-40, 40), st.booleans(), st.sampled_from([0.0, 1.0, 2.0, 16.0]))
pointers = st.one_of(tensors, descriptors, st.none())
kinds = {
    "x": tensors,
    "y": pointers,
    "z": descriptors,
    "n": numbers,
    "m": st.one_of(numbers, st.none()),
    "T": numbers,
    "B": numbers,
}
tiles = st.builds(
    lambda warps, stages: replace(TILE, num_warps=warps, num_stages=stages), *[st.sampled_from((1, 2))] * 2
)


def taken(x, y, z, n, m, T, B: tl.constexpr):
    pass


TAKEN = JITFunction(taken, do_not_specialize=["T"])


@given(st.data())
def test_launches_of_one_key_have_one_key_in_tritons_tables(gpu, data):
    one, tile = {name: data.draw(kinds[name], name) for name in kinds}, data.draw(tiles)
    # Alike but for few, or keys would hardly ever agree.
    changed = data.draw(st.sets(st.sampled_from([*kinds, "tile"]), min_size=1, max_size=2))
    other = {name: data.draw(kinds[name], name) if name in changed else one[name] for name in kinds}
    other_tile = data.draw(tiles) if "tile" in changed else tile
    ours = [_again.key_of(TAKEN, *launch) for launch in ((tile, 0, one), (other_tile, 0, other))]
    assert None not in ours
    if ours[0] == ours[1]:
        assert theirs(TAKEN, tile, one) == theirs(TAKEN, other_tile, other)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x_ptr", (torch.zeros(64),)),
        ("x_ptr", torch.nn.Parameter(torch.zeros(64))),
        ("scale", "a"),
        ("BLOCK", tl.float32),
    ],
)
def test_other_arguments_than_these_go_tritons_way(kernel, name, value):
    assert _again.key_of(kernel, TILE, 0, arguments(**{name: value})) is None


def test_so_do_arguments_in_another_order(kernel):
    assert _again.key_of(kernel, TILE, 0, dict(reversed(arguments().items()))) is None


def test_a_batch_of_another_size_has_the_same_key(kernel):
    """Numbers that a kernel does not specialise on vary from batch to batch, and must not fill the table."""
    keys = [_again.key_of(kernel, TILE, 0, arguments(T=T, scale=1 / T)) for T in (1, 16, 17, 2**31)]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_devices_and_debugging_have_keys_of_their_own(kernel, monkeypatch):
    keys = [_again.key_of(kernel, TILE, device, arguments()) for device in (0, 1)]
    monkeypatch.setattr(knobs.runtime, "debug", True)
    keys.append(_again.key_of(kernel, TILE, 0, arguments()))
    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "fpsan")
    keys.append(_again.key_of(kernel, TILE, 0, arguments()))
    monkeypatch.setattr(knobs.compilation, "fpsan_homomorphic_casts", "of 3.9", raising=False)
    keys.append(_again.key_of(kernel, TILE, 0, arguments()))
    assert len(set(keys)) == 5


# -- launches ------------------------------------------------------------------------------------------


def started(gpu, kernel, **changed):
    """The compiled kernel's launcher, and what it got."""
    gpu.started.clear()
    _again.start(kernel, 3, TILE, 0, arguments(**changed))
    ((launcher, call),) = gpu.started
    return launcher, call


def tritons_way(kernel):
    """The launches that go Triton's way."""
    return mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run)


def test_the_driver_gets_what_triton_gives_it(gpu, kernel):
    fixed = arguments()
    first = started(gpu, kernel, **fixed)
    gpu.stream = 8
    with tritons_way(kernel) as run:
        again = started(gpu, kernel, **fixed)
        assert run.call_count == 0
    assert again[0] is first[0]
    # programs, stream, function and packed metadata; no hooks; the arguments
    assert again[1][:3] == first[1][:3] == (3, 1, 1)
    assert (first[1][3], again[1][3]) == (7, 8)
    assert again[1][4:6] == first[1][4:6]
    assert again[1][6:9] == (None, None, None)
    assert len(again[1]) == len(first[1])
    assert all(x is y for x, y in zip(again[1][9:], first[1][9:], strict=True))
    gpu.stream = 7


def test_a_tensor_off_its_alignment_gets_a_kernel_of_its_own(gpu, kernel):
    x = torch.zeros(65)
    assert x.data_ptr() % 16 == 0
    on, off, on_again, off_again = (started(gpu, kernel, x_ptr=x[start:])[0] for start in (0, 1, 0, 1))
    assert (on_again, off_again) == (on, off)
    assert on is not off


def test_hooks_see_every_launch(gpu, kernel, monkeypatch):
    started(gpu, kernel)
    seen = []
    chain = knobs.HookChain()
    chain.add(seen.append)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch, tritons_way(kernel) as run:
            patch.setattr(knobs.runtime, name, chain)
            assert started(gpu, kernel)[1][6] is not None  # metadata
            assert run.call_count == 1
    with tritons_way(kernel) as run:
        kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs))
        started(gpu, kernel)
        assert run.call_count == 1
        assert len(seen) == 1


def test_kept_kernels_are_few(gpu, kernel, monkeypatch):
    monkeypatch.setattr(_again, "_MOST", 2)
    for N in (1, 2, 3):
        started(gpu, kernel, N=N)
        assert len(_again._compiled) <= 2


def test_an_interpreted_kernel_has_no_key():
    interpreted = SimpleNamespace(arg_names=[*arguments()])
    assert _again.key_of(interpreted, TILE, 0, arguments()) is None


# -- the library's own launches ------------------------------------------------------------------------


def test_every_launcher_gives_its_arguments_in_the_kernels_order():
    """Else all its launches would go Triton's way: right, and slow."""
    launches = 0
    for file in Path(dpfast.kernels.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        kernels = {x.name: [a.arg for a in x.args.args] for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "launch":
                kernel = call.args[0].id
                assert [keyword.arg for keyword in call.keywords] == kernels[kernel], f"{file.name}: {kernel}"
                launches += 1
    assert launches >= 11


@pytest.fixture
def left_by_the_interpreter():
    interpreter._patch_lang(copied)  # as it does for a device function


def test_what_the_interpreter_has_left_is_not_compiled(left_by_the_interpreter, gpu, kernel):
    assert started(gpu, kernel)[0] is not None
