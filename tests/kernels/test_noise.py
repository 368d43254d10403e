"""add_noise against Philox and Box-Muller in NumPy and fp64."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from kernel_cases import BF16, DEVICE, FP16, FP32, MARGIN, SENTINEL, few
from philox import LANES, normal, numbers, philox

from dpfast.kernels import add_noise
from dpfast.kernels.noise import _normal


def fresh(seed=0):
    return torch.empty(2, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_oracle_is_philox(counter, key, expected):
    """Known answers of its authors' library, Random123."""
    assert [int(x) for x in philox(counter, key)] == expected


@few
@given(
    size=st.sampled_from([0, 1, 7, 1024, 4095, 4096, 4097, 9000, 12288, 3 * 4096 + 1025]),
    start=st.sampled_from([0, 1, 8]),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    std=st.sampled_from([1.0, 0.37, 1e-3]),
    share=st.sampled_from([1.0, 0.3]),
    first=st.sampled_from([0, 5, 2**31 - 1, 2**32 - 4]),
)
def test_any_size(size, start, dtype, std, share, first):
    """Rounded once, nothing around it written, and the numbers are those of the seeds and the blocks."""
    generator, seeds = torch.Generator().manual_seed(size), fresh(size)
    buffer = torch.full((2 * MARGIN + start + size,), SENTINEL, dtype=dtype, device=DEVICE)
    x = buffer[MARGIN + start : MARGIN + start + size].copy_(torch.randn(size, generator=generator))
    before = x.double().cpu()
    assert add_noise(x, seeds, std, share=share, first=first) == first + -(-size // 4096)
    z = numbers(size, seeds, first)
    exact = float(np.float32(share)) * before + float(np.float32(std)) * z
    slack = 1e-6 * (std * (1.0 + z.abs()) + share * before.abs())
    ulp = torch.finfo(dtype).eps / (1 if DEVICE == "cpu" and dtype == BF16 else 2)  # the interpreter cuts bf16 off
    large = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert ((x.double().cpu() - exact).abs() <= ulp * large + slack).all()
    around = torch.cat([buffer[: MARGIN + start], buffer[MARGIN + start + size :]])
    assert (around == torch.tensor(SENTINEL, dtype=dtype)).all()


def drawn(size, seed=0, first=0):
    x = torch.zeros(size, device=DEVICE)
    add_noise(x, fresh(seed), 1.0, first=first)
    return x.cpu()


def test_they_are_normal_and_no_two_runs_are_alike():
    n = 2**18
    x = drawn(n).double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(power).mean() - moment) < 5 * (variance / n) ** 0.5, power
    for beyond, share in ((1.0, 0.3173105), (2.0, 0.0455003), (3.0, 0.0026998), (4.0, 6.334e-5)):
        assert abs((x.abs() > beyond).double().mean() - share) < 5 * (share / n) ** 0.5, beyond
    assert len(x.float().unique()) > 0.9 * n
    runs = x.view(-1, LANES)
    assert (runs @ runs.T / LANES).fill_diagonal_(0.0).abs().max() < 6.5 / LANES**0.5
    squares = runs.square() - 1.0  # the two of a pair share a radius
    assert (squares @ squares.T / LANES / 2.0).fill_diagonal_(0.0).abs().max() < 12.0 / LANES**0.5


def test_other_seeds_and_other_blocks_are_other_numbers():
    x = drawn(20000)
    assert torch.equal(x, drawn(20000))
    for other in (drawn(20000, seed=1), drawn(20000, first=5)):
        assert (x == other).float().mean() < 1e-3
    assert torch.equal(drawn(8192, first=1), drawn(12288)[4096:])  # blocks are counted, wherever a tensor begins
    both = fresh()
    for half in (0, 1):
        seeds = both.clone()
        seeds[half] += 1
        y = torch.zeros(20000, device=DEVICE)
        add_noise(y, seeds, 1.0)
        assert (x == y.cpu()).float().mean() < 1e-3


@triton.jit
def _pairs(k_ptr, y_ptr, first_ptr, second_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    first, second = _normal(tl.load(k_ptr + offs).to(tl.uint32), tl.load(y_ptr + offs).to(tl.uint32))
    tl.store(first_ptr + offs, first)
    tl.store(second_ptr + offs, second)


def test_the_ends_of_the_bits():
    """The most that can come is 6.76, no logarithm is of zero, and no root of less."""
    ends = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 129, 2**30]
    k, y = (x.reshape(-1).to(DEVICE) for x in torch.meshgrid(torch.tensor(ends), torch.tensor(ends), indexing="ij"))
    found = torch.full((2, 64), float("nan"), device=DEVICE)
    _pairs[(1,)](k, y, *found, SIZE=64)
    expected = np.stack(normal(*(x.cpu().numpy().astype(np.uint64) for x in (k, y))))
    assert np.abs(found.cpu().double().numpy() - expected).max() < 4e-6
    assert 6.7 < found.abs().max() < 6.8


@pytest.mark.parametrize(
    ("x", "seeds", "first"),
    [
        (torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), 0),
        (torch.zeros(3, 4).T, torch.zeros(2, dtype=torch.int64), 0),
        (torch.zeros(3), torch.zeros(1, dtype=torch.int64), 0),
        (torch.zeros(3), torch.zeros(2, dtype=torch.int32), 0),
        (torch.zeros(4097), torch.zeros(2, dtype=torch.int64), 2**32 - 1),
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64), -1),
    ],
    ids=["fp64", "transposed", "one seed", "short seeds", "past the last block", "before the first"],
)
def test_refuses_what_it_would_draw_wrongly(x, seeds, first):
    with pytest.raises(ValueError):
        add_noise(x.to(DEVICE), seeds.to(DEVICE), 1.0, first=first)
