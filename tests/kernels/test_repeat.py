"""A repeated call of a launcher does what the call itself would have done, and is taken only for one that is known."""

import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE

from dpfast import kernels
from dpfast.kernels import _again, _repeat
from dpfast.kernels._launch import launch
from dpfast.kernels._tiles import Tile, cdiv
from dpfast.kernels.row_sq_norm import _row_sq_norm_kernel

BF16, FP32 = torch.bfloat16, torch.float32
N, T, D, P = 2, 5, 16, 48  # multiples of 16: Triton 3.4's interpreter asks that of a descriptor's rows


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(_repeat, "_DEVICES", {"cpu", "cuda"})


@pytest.fixture
def as_written(monkeypatch):
    """How many launches have been started by a launcher's own lines."""
    seen = []

    def counted(kernel, *of, **arguments):
        seen.append(kernel)
        launch(kernel, *of, **arguments)

    for name, module in list(sys.modules.items()):
        if name.startswith("dpfast.kernels.") and hasattr(module, "launch") and name != "dpfast.kernels._launch":
            monkeypatch.setattr(module, "launch", counted)
    return seen


def fresh(launcher):
    """One that has not been called."""
    return _repeat.repeats(launcher.__wrapped__)


def rows(seed, *shape, dtype=BF16, offset=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(torch.Size(shape).numel(), generator=generator).to(dtype)
    buffer = torch.zeros(len(values) + offset, dtype=dtype)
    buffer[offset:] = values
    return buffer.to(DEVICE)[offset:].view(shape)


def pair(seed, dtype=BF16, **of):
    return rows(seed, N, T, D, dtype=dtype, **of), rows(seed + 100, N, T, P, dtype=dtype, **of)


def norms(seed):
    return {
        "row_norm_activations": rows(seed, N, T, dtype=FP32).abs(),
        "row_norm_backprops": rows(seed + 1, N, T, dtype=FP32).abs(),
    }


OF_NORM = {"eps": 1e-5, "mean": True, "bias": True, "relative": 1e-6, "added": 1e-6}
CALLS = {
    "outer_product": (lambda s: pair(s), lambda s: {"norm": True, "row_products": True, "partials": True}),
    "outer_product with bias, scaled": (lambda s: pair(s, FP32), lambda s: {"bias": True, "scale": 2.0}),
    "outer_norm": (lambda s: pair(s), lambda s: {"row_products": True, "partials": True}),
    "gram_partials": (lambda s: pair(s), norms),
    "row_norm": (lambda s: (rows(s, N, T, D),), lambda s: {}),
    "row_sq_norm": (lambda s: (rows(s, N, T, D, dtype=FP32),), lambda s: {}),
    "weighted_rows": (lambda s: (rows(s, 1, N, D, dtype=FP32), rows(s + 1, N, dtype=FP32)), lambda s: {}),
    "weighted_sum": (lambda s: (*pair(s), rows(s + 1, N, dtype=FP32)), lambda s: {"out_dtype": BF16}),
    "normalized_sum": (lambda s: (rows(s, N, T, D), rows(s + 9, N, T, D)), lambda s: OF_NORM),
}


def same(one, other):
    one, other = ((x,) if isinstance(x, torch.Tensor) else x for x in (one, other))
    assert type(one) is type(other)
    for x, y in zip(one, other, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.shape == y.shape and x.stride() == y.stride() and torch.equal(x, y)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_has_the_bits_of_the_call(name, as_written):
    written = getattr(kernels, name.split()[0]).__wrapped__
    launcher, (tensors, options) = _repeat.repeats(written), CALLS[name]
    for seed in (1, 2, 3):
        as_written.clear()
        found = launcher(*tensors(seed), **options(seed))
        assert len(as_written) == (seed == 1)
        same(found, written(*tensors(seed), **options(seed)))


def test_of_many_parts_too(as_written, monkeypatch):
    """Where T is split, a call has launches of two kernels, and a workspace."""
    tile = Tile(16, 16, 16, 0, 4, 1, "a test's", PART=128)
    written, launcher = kernels.outer_product.__wrapped__, fresh(kernels.outer_product)
    for seed in (1, 2):
        inputs = rows(seed, 1, 256, 16), rows(seed + 1, 1, 256, 16)
        as_written.clear()
        found = launcher(*inputs, norm=True, row_products=True, partials=True, tile=tile)
        assert len(as_written) == (2 if seed == 1 else 0)
        same(found, written(*inputs, norm=True, row_products=True, partials=True, tile=tile))


def test_what_two_calls_give_is_not_shared():
    launcher = fresh(kernels.outer_product)
    one, two, three = (launcher(*pair(seed), norm=True, partials=True) for seed in (1, 2, 3))
    places = {x.data_ptr() for found in (one, two, three) for x in (found.grad_sample, found.sq_norm)}
    assert len(places) == 6
    same(two, kernels.outer_product.__wrapped__(*pair(2), norm=True, partials=True))


@pytest.mark.parametrize(
    "other",
    [
        lambda: ((rows(1, N, T + 1, D), rows(2, N, T + 1, P)), {}),
        lambda: (pair(1, torch.float16), {}),
        lambda: (pair(1, offset=1), {}),
        lambda: ((rows(1, T, N, D).mT.mT.transpose(0, 1), rows(2, N, T, P)), {}),
        lambda: (pair(1), {"scale": 2.0}),
        lambda: (pair(1), {"norm": 1}),
    ],
    ids=["shape", "dtype", "alignment", "strides", "number", "type"],
)
def test_another_kind_of_call_is_written_down_anew(other, as_written):
    launcher = fresh(kernels.outer_product)
    launcher(*pair(1), norm=True)
    tensors, options = other()
    as_written.clear()
    found = launcher(*tensors, **{"norm": True, **options})
    assert as_written
    same(found, kernels.outer_product.__wrapped__(*tensors, **{"norm": True, **options}))


@pytest.mark.parametrize(
    "tensors",
    [
        lambda: (rows(1, N, T, D), rows(2, N, T, P, dtype=FP32)),  # one is copied to fp32 first
        lambda: (rows(1, N, T, D),) * 2,  # two others would be taken for one
        lambda: (rows(1, 0, T, D), rows(2, 0, T, P)),  # no launch
        lambda: pair(1),  # of two tiles, whose partial sums are added up
    ],
    ids=["copied", "one for two", "empty", "summed"],
)
def test_a_call_that_does_more_than_launch_is_never_repeated(tensors, as_written):
    written, launcher = kernels.outer_norm.__wrapped__, fresh(kernels.outer_norm)
    tile = Tile(16, 16, 16, 0, 4, 1, "a test's")
    for _ in range(3):
        inputs = tensors()
        as_written.clear()
        found = launcher(*inputs, tile=tile)
        assert len(as_written) > 0 or not inputs[0].numel()
        same(found, written(*inputs, tile=tile))


def test_after_one_tensor_for_two_two_are_two():
    launcher, x = fresh(kernels.outer_product), rows(1, N, T, D)
    launcher(x, x, norm=True, partials=True)
    for seed in (2, 3):
        inputs = rows(seed, N, T, D), rows(seed + 9, N, T, D)
        same(
            launcher(*inputs, norm=True, partials=True),
            kernels.outer_product.__wrapped__(*inputs, norm=True, partials=True),
        )
    same(launcher(x, x, norm=True, partials=True), kernels.outer_product.__wrapped__(x, x, norm=True, partials=True))


def norm_of(x, then):
    """A launcher, and what it does beside."""
    out = _repeat.empty(x.shape[:2], FP32, x.device)
    tile = Tile(16, 16, 0, 0, 4, 1, "a test's")
    sizes = {"rows": x.shape[0] * x.shape[1], "T": x.shape[1], "D": x.shape[2], "lost": 0.0, "ROOT": False}
    blocks = {"BLOCK_T": 16, "BLOCK_D": 16}
    strides = {"stride_xn": x.stride(0), "stride_xt": x.stride(1)}
    launch(
        _row_sq_norm_kernel, cdiv(sizes["rows"], 16), tile, x.device, x_ptr=x, out_ptr=out, **strides, **sizes, **blocks
    )
    return then(out)


@pytest.mark.parametrize(
    "then",
    [
        lambda out: out.mul_(2.0),
        lambda out: out * 2.0,
        lambda out: out[:, 1:],
        lambda out: out.mT,
        lambda out: (out, out),
    ],
    ids=["written to", "worked on", "a part", "turned", "twice"],
)
def test_what_is_done_with_a_result_is_not_left_out(then):
    launcher = _repeat.repeats(lambda x: norm_of(x, then))
    for seed in (1, 2, 3):
        x = rows(seed, N, T, D)
        same(launcher(x), norm_of(x, then))


def test_an_error_leaves_nothing_half_written(as_written):
    launcher = fresh(kernels.outer_product)
    with pytest.raises(ValueError, match="N and T differ"):
        launcher(rows(1, N, T, D), rows(2, N, T + 1, P))
    assert _repeat._here.made is None
    same(
        launcher(*pair(1), norm=True, partials=True),
        kernels.outer_product.__wrapped__(*pair(1), norm=True, partials=True),
    )


def test_in_inference_mode_writes_are_not_counted_and_nothing_is_written_down():
    launcher = _repeat.repeats(lambda x: norm_of(x, lambda out: out.mul_(2.0)))
    with torch.inference_mode():
        launcher(rows(1, N, T, D))
    x = rows(2, N, T, D)
    for _ in range(2):
        same(launcher(x), norm_of(x, lambda out: out.mul_(2.0)))


def test_known_calls_are_few(monkeypatch, as_written):
    monkeypatch.setattr(_repeat, "_MOST", 2)
    launcher = fresh(kernels.row_norm)
    for width in (1, 2, 3, 3):
        as_written.clear()
        launcher(rows(1, N, T, width))
    assert not as_written
    launcher(rows(1, N, T, 1))
    assert as_written


@pytest.mark.on_cpu
def test_what_was_compiled_is_started_only_under_its_circumstances(monkeypatch):
    """Without a GPU: what ran is a compiled kernel of the test's."""
    ran, asked, around = [], [], ["usual"]
    compiled = SimpleNamespace()
    monkeypatch.setattr(_again, "compiled_for", lambda kernel, tile, device, arguments: compiled)
    monkeypatch.setattr(_again, "circumstances", lambda kernel: around[0])
    monkeypatch.setattr(_again, "run", lambda of, programs, device, values: ran.append((of, programs, list(values))))
    launcher = _repeat.repeats(lambda x: norm_of(x, lambda out: out))
    launcher(rows(1, N, T, D))
    x = rows(2, N, T, D)
    found = launcher(x)
    ((of, programs, values),) = ran
    assert of is compiled and programs == cdiv(N * T, 16)
    assert values[0] is x and values[1] is found
    around[0] = None  # somebody watches
    same(launcher(x), kernels.row_sq_norm.__wrapped__(x))
    assert len(ran) == 1 and not asked


def test_descriptors_are_of_the_tensors_that_are_given(as_written):
    tile = Tile(16, 16, 16, 0, 4, 1, "a test's", TMA=True)
    options = {"norm": True, "row_products": True, "partials": True, "tile": tile}
    launcher = fresh(kernels.outer_product)
    for seed in (1, 2):
        as_written.clear()
        found = launcher(*pair(seed), **options)
        assert len(as_written) == (seed == 1)
        same(found, kernels.outer_product.__wrapped__(*pair(seed), **options))
