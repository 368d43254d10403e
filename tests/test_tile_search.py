"""The search for better tiles, on a CPU."""

from dataclasses import asdict, replace

import layers
import pytest
import rows
import tile_search
import torch

from dpfast.kernels import _tiles

BF16 = torch.bfloat16


def table(path):
    return rows.Rows(path, rows.environment("cpu"))


def test_the_tile_search_proposes_lines_that_the_table_reads(tmp_path):
    layer = layers.Layer("GPT-2 up", 2, 40, 48, 80, BF16)
    found = table(tmp_path / "tiles.jsonl")
    stop = iter([False] * 4)
    tile_search.measure(found, "cpu", lambda: next(stop, True), [layer])
    assert len(found.all()) >= 2
    assert all("ms" in row for row in found.all())
    assert found.all()[0]["own"]

    fast = {**found.all()[1], "ms": 0.5 * found.all()[0]["ms"]}
    found.add(**fast)
    (line,) = tile_search.proposal(found)
    ((key, (row,)),) = _tiles._parse(line).items()
    assert key == (layers.KERNEL[fast["verb"]], "interpreter", fast["dtype"])
    assert replace(row.tile, source="") == replace(_tiles.Tile(**fast["tile"]), source="")
    assert row.tile.source.startswith("measured on ")


@pytest.mark.parametrize("arch", _tiles.ARCHES)
def test_candidates_start_with_the_own_tile_and_fit_the_device(arch):
    for verb, layer in ((verb, layer) for verb in tile_search.CALLS for layer in layers.LAYERS if not layer.lookup):
        own = _tiles.tile(layers.KERNEL[verb], layer.T, layer.D, layer.P, layer.dtype, arch)
        found = tile_search.candidates(verb, layer, own, arch)
        assert found[0] == own
        assert len(set(found)) == len(found) <= tile_search.MOST
        ideas = tile_search.ideas(verb, layer, own, arch)
        assert found[1 : 1 + len(ideas)] == ideas
        assert all(tile_search.fits(verb, layer, tile, arch) for tile in found[1 + len(ideas) :])


def test_the_tile_search_takes_first_what_is_worth_most(tmp_path, monkeypatch):
    """All ideas for the rows of large layers, norms first, before any neighbours; and nothing twice."""
    monkeypatch.setattr(tile_search._launch, "arch_of", lambda _: "sm_90")
    found = table(tmp_path / "tiles.jsonl")
    searches = tile_search.searches(found, "cpu", layers.LAYERS)
    assert [(s.verb, s.layer.name) for s in searches[:5]] == [
        *((verb, "Llama-3.2-1B up") for verb in ("direct norm", "weighted sum", "Gram norm", "grad_sample")),
        ("direct norm", "GPT-2 up, fp32"),
    ]
    first = searches[0]
    assert first.tiles[0] == first.row.tile
    assert any({tile.BLOCK_D, tile.BLOCK_P} == {128, 256} for tile in first.tiles)
    tiles = [(s.verb, s.kind, s.row, tile) for s in searches for tile in s.tiles]
    assert len(tiles) == len(set(tiles))
    assert {(s.verb, s.kind, s.row) for s in searches} == {key[:3] for key in tile_search.classes("cpu")}

    key = {"verb": first.verb, "arch": "sm_90", "dtype": "16-bit", "when": tile_search.when(first.row)}
    found.add(**key, layer=first.layer.name, tile=asdict(first.tiles[1]), ms=1.0)
    assert first.tiles[1] not in tile_search.searches(found, "cpu", layers.LAYERS)[0].tiles
