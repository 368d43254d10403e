"""The tile table: pure, total, and never of N."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import shapes_of_rows

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
def test_every_shape_has_a_tile(verb, T, D, P, dtype, arch):
    tile = _tiles.tile(verb, T, D, P, dtype, arch)
    assert tile in [row.tile for row in _tiles.ROWS[verb, arch, "fp32" if dtype == torch.float32 else "16-bit"]]


GROUPS = [pytest.param(*group, id="-".join(group)) for group in _tiles.ROWS]


def test_every_verb_architecture_and_dtype_has_rows():
    assert set(_tiles.ROWS) == {(v, a, d) for v in _tiles.VERBS for a in ARCHES for d in ("16-bit", "fp32")}


@pytest.mark.parametrize(("verb", "arch", "dtype"), GROUPS)
def test_rows(verb, arch, dtype):
    rows = _tiles.ROWS[verb, arch, dtype]
    assert rows[-1].conditions == ()
    assert {number for number, _ in shapes_of_rows(verb, arch, dtype)} == set(range(len(rows))), (
        "a row is never reached"
    )
    for row in rows:
        tile = row.tile
        blocks = (tile.BLOCK_T, tile.BLOCK_D, tile.BLOCK_P, tile.BLOCK_K)
        assert all(block & (block - 1) == 0 for block in blocks)
        assert tile.source
        if verb != "row_sq_norm":
            assert all(block == 0 or block >= 16 for block in blocks)
        if verb in ("outer_product", "outer_norm"):
            assert _tiles.CHAIN % tile.BLOCK_T == 0
        if verb == "gram_norm":
            assert _tiles.CHAIN % tile.BLOCK_K == 0
        assert tile.PART % _tiles.CHAIN == 0


@pytest.mark.parametrize("arch", _tiles.ARCHES)
def test_shapes_with_rows_of_their_own(arch):
    """The conditions that the table is asked to tell apart: LoRA, LM heads, one position, convolutions."""

    def of(T, D, P, verb="outer_norm"):
        return _tiles.tile(verb, T, D, P, torch.bfloat16, arch)

    general = of(2048, 4096, 4096)
    assert of(1024, 4096, 8).BLOCK_P == 16
    assert of(1024, 4096, 32).BLOCK_P == 32
    assert of(1024, 16, 4096).BLOCK_D == 16
    assert of(1, 4096, 4096).BLOCK_T == 16
    assert "LM head" in of(1024, 4096, 128256).source
    assert "LM head" in of(1024, 4096, 128256, "gram_norm").source
    assert "convolutions" in of(12544, 147, 64).source
    assert 0 < of(12544, 147, 64).PART < general.PART


@pytest.mark.parametrize("arch", _tiles.ARCHES)
@pytest.mark.parametrize("verb", ["outer_product", "outer_norm", "gram_norm", "weighted_sum"])
def test_long_odd_rows_have_the_tile_of_the_next_multiple(verb, arch):
    """GPT-2's head: they are copied to it first. Where that would not pay, rows are loaded by element."""

    def of(*sizes, dtype=torch.bfloat16):
        return _tiles.tile(verb, *sizes, dtype, arch), _tiles.row_step(verb, *sizes, dtype)

    tile, step = of(1024, 768, 50257)
    assert step == 16
    assert "element" not in tile.source
    assert (tile, 1) == of(1024, 768, 50272)
    for sizes in ((1024, 768, 768), (16, 768, 50257), (255, 255, 511)):
        assert of(*sizes)[1] == 1
    assert "element" in of(255, 255, 511)[0].source
    assert of(1024, 768, 50257, dtype=torch.float32)[1] == 1
    # Of one launch are only runs that are read in one way.
    lengths = [n for n in range(60, 1100) if of(n, 700, 701)[1] == 16]
    others = sorted(set(range(60, 1100)) - set(lengths))
    assert lengths and others
    classes = [{_tiles.run_class(verb, n, 700, 701, torch.bfloat16, arch) for n in ns} for ns in (lengths, others)]
    assert not classes[0] & classes[1]


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
@given(programs=st.integers(1, 10**5), most=st.integers(0, 10**6), arch=st.sampled_from(ARCHES))
def test_splits_are_no_more_than_allowed(programs, most, arch):
    assert 1 <= _tiles.splits(programs, most, arch) <= max(1, most)


def test_splits_fill_the_device():
    assert _tiles.splits(1024, 128, "sm_90") == 1  # 7.75 waves
    assert _tiles.splits(36, 128, "sm_90") == 3  # 108 of 132; a fourth part would start a second wave
    assert _tiles.splits(1, 128, "sm_90") == 119


@settings(derandomize=True, deadline=None)
@given(T=st.integers(1, 10**5), D=st.integers(1, 5000), P=st.integers(1, 5000), arch=st.sampled_from(ARCHES))
def test_a_split_covers_every_position_once(T, D, P, arch):
    tile = _tiles.tile("outer_norm", T, D, P, torch.bfloat16, arch)
    parts, part = _tiles.split(tile, T, D, P, arch)
    assert part % _tiles.CHAIN == 0
    assert (parts - 1) * part < T <= parts * part
    assert parts == 1 or (part >= tile.PART and 4 * parts * P * (D + 1) <= _tiles.WORKSPACE_BYTES)


@pytest.mark.parametrize(("T", "D", "P"), [(8192, 1024, 1024), (12544, 147, 64)])
def test_one_long_sample_fills_the_device(T, D, P):
    tile = _tiles.tile("outer_norm", T, D, P, torch.bfloat16, "sm_90")
    parts, _ = _tiles.split(tile, T, D, P, "sm_90")
    assert 0.7 * 132 <= parts * -(-D // tile.BLOCK_D) * -(-P // tile.BLOCK_P) <= 132


@pytest.mark.parametrize("arch", _tiles.ARCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_norms_of_few_long_rows_wait_little(arch, dtype):
    """Of 2048 rows, two samples of 1024 positions, there are programs enough, and each reads its rows in few steps."""
    for D, steps in ((768, 1), (2048, 1), (5632, 3), (32000, 16)):
        tile = _tiles.tile("row_sq_norm", 1024, D, 0, dtype, arch)
        assert 2048 // tile.BLOCK_T >= 512 and steps >= -(-D // tile.BLOCK_D)
