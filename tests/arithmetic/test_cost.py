"""The choice of way: pure arithmetic."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dpfast.arithmetic import bounds, cost, products
from dpfast.factors import OuterProduct


@pytest.mark.parametrize(
    ("t", "d", "p", "way"),
    [
        (1, 4096, 4096, "rank_one"),
        (0, 8, 8, "rank_one"),
        (256, 4096, 4096, "gram"),
        (8192, 1024, 1024, "direct"),
        (1024, 4096, 16, "direct"),  # LoRA
        (8, 4096, 16, "gram"),
        (1024, 27, 64, "direct"),  # a convolution's windows
    ],
)
def test_ways(t, d, p, way):
    assert cost.norm_way(t, d, p) == way


@settings(derandomize=True, max_examples=300)
@given(st.integers(2, 10**5), st.integers(1, 10**5), st.integers(1, 10**5))
def test_the_way_is_the_cheapest_that_is_tight(t, d, p):
    way = cost.norm_way(t, d, p)
    flops = {w: cost.norm_flops(w, t, d, p) for w in ("gram", "direct")}
    assert flops[way] == min(flops.values()) or cost.gram_slack(t, d, p) > cost.MAX_GRAM_SLACK
    assert cost.norm_way(t, p, d) == way


def test_crossover_is_where_the_flops_are_equal():
    d = p = 512
    crossover = 2 * d * p // (d + p) - bounds.GRAM_TILE  # the diagonal's tiles are computed whole
    assert cost.norm_way(crossover - 1, d, p) == "gram"
    assert cost.norm_way(crossover + 1, d, p) == "direct"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keeping_stays_within_its_budget(dtype):
    kept = 0
    for t, d, p in [(128, 256, 1024), (1024, 128, 128), (1, 10, 10), (17, 64, 192), (256, 4096, 8)]:
        factor = OuterProduct(torch.zeros(2, t, d, dtype=dtype), torch.zeros(2, t, p, dtype=dtype))
        if factor.keeps:
            kept += 1
            assert factor.kept().values.nbytes <= cost.KEEP_RATIO * factor.nbytes
    assert kept and not cost.keeps(1, 0, 1) and cost.keeps(2, 1, 1) and not cost.keeps(2, 2, 1)


CPU = torch.device("cpu")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NORMS, TURNS = RESULTS / "norms.jsonl", RESULTS / "turns.jsonl"


def test_what_a_flop_of_the_gram_way_takes_is_what_the_rows_say():
    found = {}
    for row in map(json.loads, NORMS.read_text().splitlines()):
        found.setdefault(row["multiplier"], []).append(row["gram_flop"])
    assert {who: round(statistics.median(taken), 1) for who, taken in found.items()} == cost.GRAM_FLOP


def test_what_is_taken_in_turn_gains_by_the_rows():
    taken = []
    for row in map(json.loads, TURNS.read_text().splitlines()):
        t, d, p = row["t"], row["d"], row["p"]
        flops = cost.norm_flops(cost.norm_way(t, d, p), t, d, p)
        size = cost.Size(t, flops, 4 * d * p, 4 * t * (d + p), "cpu")
        if all(cost.in_turn([size] * row["layers"])):
            taken.append(row["in_turn_over_otherwise"])
    assert len(taken) >= 20 and max(taken) <= 1.1 and statistics.median(taken) <= 0.9


@pytest.mark.parametrize("who", cost.GRAM_FLOP)
def test_a_cpu_goes_direct_where_its_gram_norm_takes_longer(monkeypatch, who):
    monkeypatch.setattr(products, "multiplier", lambda: who)
    monkeypatch.setattr(cost, "_GRAM_FLOP_HERE", cost.GRAM_FLOP[who])
    t, d, p = 256, 256, 1024
    assert cost.norm_way(t, d, p) == cost.norm_way(t, d, p, torch.device("cuda")) == "gram"
    assert cost.norm_way(t, d, p, CPU) == "direct"
    assert cost.norm_way(t // 2, d, p, CPU) == "gram"
    assert who in cost.norm_report()


@pytest.mark.parametrize(("t", "way"), [(4, "direct"), (8, "direct"), (16, "gram"), (17, "direct"), (32, "direct")])
def test_positions_that_only_the_gram_way_has_count(t, way):
    """It has 16 or 32 here. Of what kernels do with T = 8 or 17, which they take as it is, that says nothing."""
    assert cost.norm_way(t, 64, 64, CPU) == way
    assert cost.norm_way(8, 64, 64) == cost.norm_way(17, 64, 64) == "gram"


def test_instructions_without_a_row_are_weighed_by_flops():
    """In a process of its own, in which MKL is told to use none that a row is of."""
    code = (
        "import torch; from dpfast.arithmetic import cost\n"
        "assert cost.norm_way(256, 256, 1024, torch.device('cpu')) == 'gram'\n"
        "assert 'nothing is measured with unknown' in cost.norm_report()\n"
    )
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.on_cpu
def test_the_way_of_a_norm_is_the_one_of_its_device(monkeypatch):
    taken = []
    monkeypatch.setattr(cost, "norm_way", lambda *args: taken.append(args) or "direct")
    OuterProduct(torch.ones(2, 3, 64), torch.ones(2, 3, 80)).sq_norm()
    assert taken == [(3, 64, 80, CPU)]
