"""A launch of one call gives Triton's function in C what Triton's own launcher would have given it.

No GPU is needed: the launcher is Triton's, and its function one of the test's.
"""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dpfast.kernels import _again, _repeat
from dpfast.kernels._tiles import Tile

nvidia = pytest.importorskip("triton.backends.nvidia.driver")

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not _again._KNOWN, reason="this Triton's launches all go Triton's way"),
]

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 8, 8], "fp4_padded": False}


CPU = torch.device("cpu")


class Utils:
    """What encodes maps: a map is all that it follows from."""

    @staticmethod
    def fill_tma_descriptor_tiled(*of):
        return str(of)

    fill_tma_descriptor = fill_tma_descriptor_tiled  # Triton 3.6's


@pytest.fixture
def gpu():
    before = driver._active
    driver.set_active(SimpleNamespace(utils=Utils(), get_current_stream=lambda device: 7))
    yield
    driver.set_active(before)


def compiled_like(values, metas=(META, {**META, "swizzle": 2}), **of_launcher):
    """A compiled kernel of such arguments, and what its function has got."""
    got = []
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    described = [isinstance(x, TensorDescriptor) for x in values]
    signature = {i: "tensordesc<bf16[1,8,8]>" if yes else "other" for i, yes in enumerate(described)}
    launch = nvidia.wrap_handle_tensordesc(lambda *a: got.append(a), signature, list(metas)[: sum(described)])
    known = {"launch": launch, "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True}
    known["gsan_enabled"] = False  # from Triton 3.8 on
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    run.__dict__.update(known, **sizes, **aligned, arg_annotations=["of all"], kernel_signature=b"of all")
    run.__dict__.update(of_launcher)
    return SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0)), got


def arguments(described, seed=0):
    tensors = [torch.full((2, 16, 16), seed + i, dtype=torch.bfloat16) for i in range(4)]
    x, y, z, out = tensors
    if described:
        x, y = (TensorDescriptor(t, [2, 16, 16], [256, 16, 1], [1, 8, 8]) for t in (x, y))
    return tensors, {"x": x, "n": 3, "z": z, "y": y, "scale": 0.5, "nothing": None, "out": out, "BLOCK": 16}


def places_of(tensors, values):
    """As ``_repeat._launch`` finds them."""
    numbers = {id(x): i for i, x in enumerate(tensors)}
    of_tensors = [(i, numbers[id(x)]) for i, x in enumerate(values) if isinstance(x, torch.Tensor)]
    found = [(i, x) for i, x in enumerate(values) if isinstance(x, TensorDescriptor)]
    rest = [{name: value for name, value in vars(x).items() if name != "base"} for _, x in found]
    descriptors = [(i, numbers[id(x.base)], of) for (i, x), of in zip(found, rest, strict=True)]
    special = (torch.Tensor, TensorDescriptor)
    return [None if isinstance(x, special) else x for x in values], of_tensors, descriptors


def flat(call):
    """All arguments, a tensor by its address, in whatever lists they came."""
    found = []
    for x in call:
        if isinstance(x, (list, tuple)):
            found += flat(x)
        else:
            found.append(x.data_ptr() if isinstance(x, torch.Tensor) else x)
    return found


@pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
def test_it_gets_what_tritons_launcher_gives_it(gpu, described, monkeypatch):
    """Of the second call, whose tensors are others than those of the first, and of a third with the second's."""
    tile, kernel = Tile(16, 16, 16, 0, 4, 1, "a test's"), object()
    tensors, of_first = arguments(described)
    compiled, got = compiled_like([*of_first.values()])
    monkeypatch.setattr(_again, "compiled_for", lambda *of: compiled)
    monkeypatch.setattr(_again, "circumstances", lambda kernel: "usual")
    numbers = {id(x): i for i, x in enumerate(tensors)}
    launch = _repeat._launch(numbers, len(tensors), kernel, 3, tile, of_first)
    assert launch.straight is not None
    call = _repeat._Call((), (launch,), (), tuple)
    others, theirs = arguments(described, seed=9)
    for _ in range(2):
        got.clear()
        _repeat._repeated([(call, [*others], [x.data_ptr() for x in others])], CPU)
        _again.run(compiled, 3, 0, theirs.values())
        ours, tritons = got
        assert len(ours) == len(tritons) and flat(ours) == flat(tritons)
        kernels_own = ours[-1] if _again._IN_ONE else ours
        assert not any(isinstance(x, torch.Tensor) for x in kernels_own)
    maps = [of for *_, of in launch.straight.descriptors]
    assert [[*of] for of in maps] == ([[x.data_ptr()] for x in others[:2]] if described else [])


def moved(x, y, z_ptr, T, D, BLOCK: tl.constexpr):
    tile = x.load([0, 0, 0]) + y.load([0, 0, 0])
    places = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, BLOCK)
    tl.store(z_ptr + places, tile.reshape(BLOCK, BLOCK), mask=tl.arange(0, BLOCK)[:, None] < T)


def added(x_ptr, y_ptr, z_ptr, T, D, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    total = tl.load(x_ptr + places) + tl.load(y_ptr + places)
    tl.store(z_ptr + places, total * D, mask=places < T)


@pytest.fixture
def sm_90(gpu, compiler, monkeypatch, tmp_path):
    """Compiles for one, and starts what it has compiled through Triton's launcher; what its function gets is noted."""
    got, active = [], driver.active
    active.launcher_cls = nvidia.CudaLauncher
    active.get_current_device = lambda: 0
    active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    of_utils = {
        "get_device_properties": lambda device: {"max_shared_mem": 2**17},
        "load_binary": lambda name, kernel, shared, device: (name, kernel, 0, 0, 1024),
        "unload_module": lambda module: None,
        "build_signature_metadata": tuple,
        "launch": lambda *of: got.append(of),
    }
    for name, value in of_utils.items():
        setattr(active.utils, name, value)
    # Which the driver's C defines.
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **of: of["type"], raising=False)
    for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        monkeypatch.setattr(nvidia, name, name, raising=False)
    monkeypatch.setattr(_again, "_compiled", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return got


@pytest.mark.skipif(not _again._IN_ONE, reason="Triton 3.6 compiles a launcher in C of each kernel, for the driver's")
@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "pointers"])
def test_of_a_kernel_that_triton_has_compiled(sm_90, described, monkeypatch):
    tile, kernel = Tile(16, 16, 16, 0, 4, 1, "a test's"), JITFunction(moved if described else added)
    tensors = [torch.zeros(1, 16, 16) for _ in range(3)]
    x, y = (TensorDescriptor(t, [1, 16, 16], [256, 16, 1], [1, 16, 16]) if described else t for t in tensors[:2])
    of = dict(zip(kernel.arg_names, (x, y, tensors[2], 5, 16, 16), strict=True))
    _again.start(kernel, 3, tile, 0, of)  # Triton's way
    found = _again.compiled_for
    monkeypatch.setattr(_again, "compiled_for", lambda kernel, tile, index, of: found(kernel, tile, 0, of))
    launch = _repeat._launch({id(t): i for i, t in enumerate(tensors)}, 3, kernel, 3, tile, of)
    _repeat._repeated([(_repeat._Call((), (launch,), (), tuple), [*tensors], [t.data_ptr() for t in tensors])], CPU)
    theirs, ours = sm_90
    assert len(launch.straight.descriptors) == (2 if described else 0)
    hooks = slice(8, 11)  # and metadata for them: of nobody, which Triton asks all the same
    assert ours[hooks] == (None, None, None)
    assert flat(ours[:8] + ours[11:]) == flat(theirs[:8] + theirs[11:])


def test_maps_are_few(gpu, monkeypatch):
    monkeypatch.setattr(_again, "MOST_MAPS", 2)
    monkeypatch.setattr(_again, "circumstances", lambda kernel: "usual")
    tensors, of = arguments(True)
    compiled, _ = compiled_like([*of.values()])
    monkeypatch.setattr(_again, "compiled_for", lambda *of: compiled)
    numbers = {id(x): i for i, x in enumerate(tensors)}
    launch = _repeat._launch(numbers, len(tensors), object(), 3, Tile(16, 16, 16, 0, 4, 1, "a test's"), of)
    kept = [arguments(True, seed)[0] for seed in range(5)]
    for others in kept:
        call = _repeat._Call((), (launch,), (), tuple)
        _repeat._repeated([(call, [*others], [x.data_ptr() for x in others])], CPU)
        assert all(len(maps) <= 2 for *_, maps in launch.straight.descriptors)


@pytest.mark.parametrize(
    ("metas", "of_launcher"),
    [
        ((META, None), {}),
        ((META, {**META, "fp4_padded": True}), {}),
        ((META, META), {"global_scratch_size": 1}),
        ((META, META), {"profile_scratch_size": 1}),
        ((META, META), {"gsan_enabled": True}),
    ],
    ids=["no map", "of four bits", "scratch", "profiled", "with arguments of its own"],
)
def test_other_launchers_than_these_run_as_they_are(gpu, metas, of_launcher):
    tensors, of = arguments(True)
    compiled, _ = compiled_like([*of.values()], metas, **of_launcher)
    assert _again.straight(compiled, *places_of(tensors, [*of.values()])) is None


def test_so_does_one_that_is_not_tritons(gpu):
    tensors, of = arguments(False)
    launcher = SimpleNamespace(run=lambda *of: None, function=5, packed_metadata=())
    assert _again.straight(launcher, *places_of(tensors, [*of.values()])) is None


@pytest.mark.parametrize("why", ["hooks", "alignment"])
def test_a_launch_that_is_not_as_then_goes_tritons_way(gpu, monkeypatch, why):
    """Somebody looks at launches now, or what is made stands elsewhere than at a multiple of 16."""
    tile, around, started = Tile(16, 16, 16, 0, 4, 1, "a test's"), ["usual"], []
    tensors, of = arguments(False)
    compiled, got = compiled_like([*of.values()])
    monkeypatch.setattr(_again, "compiled_for", lambda *of: compiled)
    monkeypatch.setattr(_again, "circumstances", lambda kernel: around[0])

    class Kernel:
        def __getitem__(self, grid):
            return lambda **of: started.append(of)

    numbers = {id(x): i for i, x in enumerate(tensors)}
    launch = _repeat._launch(numbers, 3, Kernel(), 3, tile, of)
    call = _repeat._Call((tensors[3],), (launch,), (3,), None)
    if why == "hooks":
        around[0] = None
    else:
        odd = torch.zeros(513, dtype=torch.bfloat16)[1:].view(2, 16, 16)
        monkeypatch.setattr(_repeat, "_empty_like", lambda like, memory_format: odd)
    given = tensors[:3]
    (found,) = _repeat._repeated([(call, [*given], [x.data_ptr() for x in given])], CPU)
    assert not got and len(started) == 1
    assert started[0]["out"] is found and started[0]["x"] is given[0]
