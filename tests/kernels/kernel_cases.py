"""Inputs, guards and oracles that the kernels' tests share."""

import contextlib
import functools
import itertools
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings

from dpfast.kernels import _tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Some rows wide, so that a mask that is one off fails a test instead of ending the process.
MARGIN = 1 << 11
SENTINEL = 12345.0

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPE_PAIRS = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP32, FP16), (FP16, BF16)]
LAYOUTS = ("contiguous", "time_first", "padded", "one_sample", "one_position")

# The interpreter runs about a thousand small tiles a second.
few = settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


class Guarded:
    """A strided (N, T, F) view into a buffer that is NaN everywhere else, and a copy to compare with."""

    def __init__(self, N, T, F, dtype, layout="contiguous", seed=0):
        strides = {
            "contiguous": (T * F, F, 1),
            "time_first": (F, N * F, 1),
            "padded": (T * (F + 3) + 5, F + 3, 1),
            "one_sample": (0, F, 1),
            "one_position": (F, 0, 1),
        }[layout]
        shape = (N, T, F)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        buffer = torch.full((2 * MARGIN + extent,), float("nan"), dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, generator=generator) + 0.5
        if layout == "one_sample":
            values = values[:1]
        if layout == "one_position":
            values = values[:, :1]
        torch.as_strided(buffer, values.shape, strides, MARGIN).copy_(values)
        self.buffer = buffer.to(DEVICE)
        self.tensor = torch.as_strided(self.buffer, shape, strides, MARGIN)
        self.before = self.buffer.clone()

    def check(self):
        bits = torch.int32 if self.buffer.dtype == FP32 else torch.int16
        assert torch.equal(self.buffer.view(bits), self.before.view(bits)), "an input was written to"


@contextlib.contextmanager
def guarded_outputs():
    """`torch.empty` gives NaN between sentinels, which must be there at the end."""
    buffers = []

    def empty(*shape, dtype=torch.float32, device=None):
        shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        buffer = torch.full((shape.numel() + 2 * MARGIN,), SENTINEL, dtype=dtype, device=device)
        inner = buffer[MARGIN : MARGIN + shape.numel()]
        inner.fill_(float("nan"))
        buffers.append(buffer)
        return inner.view(shape)

    with mock.patch.object(torch, "empty", empty):
        yield
    for buffer in buffers:
        around = torch.cat([buffer[:MARGIN], buffer[-MARGIN:]])
        assert (around == torch.tensor(SENTINEL, dtype=buffer.dtype)).all(), "written outside an output"


def call(launcher, *inputs, **options):
    """`launcher` on guarded inputs, with every guard checked afterwards."""
    with guarded_outputs():
        result = launcher(*(x.tensor if isinstance(x, Guarded) else x for x in inputs), **options)
    for x in inputs:
        if isinstance(x, Guarded):
            x.check()
    return result


def wide(x):
    return (x.tensor if isinstance(x, Guarded) else x).detach().cpu().double()


def assert_close(actual, expected, scale=None, tolerance=1e-6):
    """‖actual - expected‖ <= tolerance · ‖scale‖; NaN never passes.

    `scale` is the same sum over absolute values where terms may cancel, else `expected` itself.
    """
    assert actual.shape == expected.shape
    error = (actual.cpu().double() - expected).norm()
    bound = tolerance * (expected if scale is None else scale).norm()
    assert error <= bound, f"error {error:.3e} above {bound:.3e}"


def identical(x, y):
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def same_sums(x, y):
    """Of two ways to read the same numbers: the same bits in the interpreter. Compiled, a product of what stands in
    shared memory and one of what has passed through registers add up in another order (seen on an H200)."""
    if DEVICE == "cpu":
        assert identical(x, y)
    else:
        assert_close(x, y.cpu().double())


def tiles(layouts=("per_sample",)):
    """Small blocks of every kind, to be ragged around."""
    return st.builds(
        _tiles.Tile,
        BLOCK_T=st.sampled_from([16, 32]),
        BLOCK_D=st.sampled_from([16, 64]),
        BLOCK_P=st.sampled_from([32, 128]),
        BLOCK_K=st.sampled_from([16, 32]),
        num_warps=st.just(4),
        num_stages=st.just(2),
        source=st.just("test"),
        layout=st.sampled_from(layouts),
        TMA=st.booleans(),
    )


@st.composite
def pairs(draw):
    """(activations, backprops), guarded, of any shape, dtype pair and layout."""
    N = draw(st.integers(0, 5))
    T = draw(st.integers(0, 70))
    D = draw(st.integers(1, 130))
    P = draw(st.integers(1, 130))
    dtype_a, dtype_b = draw(st.sampled_from(DTYPE_PAIRS))
    layout_a, layout_b = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS))
    return Guarded(N, T, D, dtype_a, layout_a, seed=1), Guarded(N, T, P, dtype_b, layout_b, seed=2)


def ordinary(dtypes, N=3, T=70, D=96, P=130):
    return Guarded(N, T, D, dtypes[0], seed=1), Guarded(N, T, P, dtypes[1], seed=2)


def empty_shapes():
    """Every (N, T, D, P) with at least one dim of size zero."""
    return [shape for shape in itertools.product((0, 2), (0, 3), (0, 5), (0, 4)) if 0 in shape]


@functools.cache
def shapes_of_rows(verb, arch, dtype):
    """{(number of a row of the table, whether D and P are multiples of 16): a (T, D, P) that the row is for}.

    None whose rows are copied to such multiples first: that is to be asked for.
    """
    rows, shapes = _tiles.ROWS[verb, arch, dtype], {}
    for aligned, features in (
        (True, (4096, 128256, 1152, 256, 64, 32, 16, 768)),
        (False, (4095, 131071, 1153, 147, 63, 31, 13, 767)),
    ):
        for T, D, P in itertools.product((4096, 512, 128, 48, 32, 16), features, features):
            if _tiles.row_step(verb, T, D, P, FP32 if dtype == "fp32" else BF16) > 1:
                continue
            number = next(i for i, row in enumerate(rows) if row.fits(T, D, P))
            shapes.setdefault((number, aligned), (T, D, P))
    return shapes
