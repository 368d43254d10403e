"""benchmarks/host_time.py on a tiny model."""

from dataclasses import replace

import host_report
import host_time
import pytest
import workloads
from rows import Rows, environment


def test_host_time_counts_every_op_in_one_stage(tmp_path):
    tiny = replace(host_time.MODELS["toy"], build=lambda: workloads.Gpt(host_time.WORDS, 8, 1, 8))
    measured = host_time.measure(tiny, rounds=2)
    by_leg = {row["leg"]: row for row in measured}
    plain, private = by_leg["plain"], by_leg[host_time.ONE_PASS]
    assert private["taps"] == 10 and plain["ratio_plain"] == 1.0 and plain["ops_a_tap"] == 0
    stages = private["stages"]
    assert sum(of["ops_a_tap"] for of in stages.values()) == pytest.approx(private["ops_a_tap"])
    assert all(stages[stage]["ops_a_tap"] > 0 for stage in ("norms and bounds", "clipped sums"))
    assert stages["rules"]["ops_a_tap"] == 0  # all of it is done by recipe
    for row in measured:
        Rows(tmp_path / "host_time.jsonl", environment("cpu")).add(**row)
    written = list(host_report.lines(host_report.newest(tmp_path)))
    assert f"## {tiny.title}" in written
    assert all(any(line.startswith(f"| {name} |") for line in written) for name in (*by_leg, *stages))
