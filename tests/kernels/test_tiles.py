"""The tile table: pure, total, and never of N."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dpfast.kernels import _tiles

ARCHES = (*_tiles.ARCHES, "interpreter")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
sizes = st.integers(1, 10**6)


@settings(derandomize=True, deadline=None)
@given(
    verb=st.sampled_from(_tiles.VERBS),
    T=sizes,
    D=sizes,
    P=sizes,
    dtype=st.sampled_from(DTYPES),
    arch=st.sampled_from(ARCHES),
)
def test_every_shape_has_one_of_the_enumerated_tiles(verb, T, D, P, dtype, arch):
    tile = _tiles.tile(verb, T, D, P, dtype, arch)
    assert tile in _tiles.distinct(verb, dtype, arch)
    assert tile.source.startswith("from static analysis")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("verb", _tiles.VERBS)
def test_blocks_are_powers_of_two_that_a_dot_accepts(verb, arch):
    for dtype in DTYPES:
        for tile in _tiles.distinct(verb, dtype, arch):
            blocks = (tile.BLOCK_T, tile.BLOCK_D, tile.BLOCK_P, tile.BLOCK_K)
            assert all(block & (block - 1) == 0 for block in blocks)
            if verb != "row_sq_norm":
                assert all(block == 0 or block >= 16 for block in blocks)


@pytest.mark.parametrize("verb", ["outer_product", "outer_norm", "weighted_sum"])
def test_thin_layers_have_narrow_blocks(verb):
    wide = _tiles.tile(verb, 1024, 4096, 4096, torch.bfloat16, "sm_90")
    thin = _tiles.tile(verb, 1024, 4096, 8, torch.bfloat16, "sm_90")
    assert (thin.BLOCK_P, thin.BLOCK_D) == (64, wide.BLOCK_D)
    thin = _tiles.tile(verb, 1024, 64, 4096, torch.bfloat16, "sm_90")
    assert (thin.BLOCK_P, thin.BLOCK_D) == (wide.BLOCK_P, 64)


def test_weighted_sums_of_few_positions_go_over_rows():
    layouts = {T: _tiles.tile("weighted_sum", T, 512, 512, torch.bfloat16, "sm_90").layout for T in (1, 63, 64)}
    assert layouts == {1: "flat", 63: "flat", 64: "per_sample"}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_86", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_90", "sm_90"),
        ("sm_100", "sm_100"),
        ("sm_103", "sm_100"),
        ("sm_120", "sm_80"),
        ("gfx950", "gfx942"),
        ("gfx942", "gfx942"),
        ("interpreter", "interpreter"),
    ],
)
def test_family(arch, expected):
    assert _tiles.family(arch) == expected


@pytest.mark.parametrize("arch", ["sm_75", "cpu", "sm_"])
def test_no_family(arch):
    with pytest.raises(ValueError, match="no tiles for architecture"):
        _tiles.family(arch)


def test_no_verb():
    with pytest.raises(ValueError, match="no verb"):
        _tiles.tile("norm", 1, 1, 1, torch.float32, "sm_90")


@settings(derandomize=True, deadline=None)
@given(programs=st.integers(1, 10**5), steps=st.integers(0, 10**6), arch=st.sampled_from(ARCHES))
def test_splits_keep_four_steps_a_part(programs, steps, arch):
    count = _tiles.splits(programs, steps, arch)
    assert count >= 1
    assert count == 1 or steps // count >= 4


def test_splits_fill_the_device():
    assert _tiles.splits(1024, 512, "sm_90") == 1  # 7.75 waves
    assert _tiles.splits(36, 512, "sm_90") == 3  # 108 of 132; a fourth part would start a second wave
    assert _tiles.splits(1, 512, "sm_90") == 119
