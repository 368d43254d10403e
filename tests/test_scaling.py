"""What one-pass clipping costs by T, N and width, and what ways to a norm cost: its rows, table and picture."""

import json

import pytest
import scaling
import scaling_report

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.on_cpu
def test_where_each_way_wins(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "RESULTS", tmp_path)
    monkeypatch.setattr(scaling, "ROUNDS", 1)
    monkeypatch.setattr(scaling, "NEAR_EQUAL", [(16, 24, 12)])
    monkeypatch.setattr(scaling, "TURNS", [(2, 16, 24, 12)])
    scaling.norms()
    scaling.turns()
    norms, turns = (json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in ("norms", "turns"))
    assert norms["gram_over_direct"] > 0.0 and turns["in_turn_over_otherwise"] > 0.0


@pytest.mark.on_cpu
def test_steps_by_length_batch_and_width(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "RESULTS", tmp_path)
    monkeypatch.setattr(scaling, "GENERATIONS", 1)
    monkeypatch.setattr(scaling, "TURNS_EACH", 2)
    monkeypatch.setattr(scaling, "STEPS", {"T": [(2, 16, 32), (1, 32, 32)], "N": [(2, 16, 32)]})
    scaling.steps()
    for row in map(json.loads, (tmp_path / "scaling.jsonl").read_text().splitlines()):
        assert 0.5 < row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] and row["tensors"] > 0.9
    by_t = next(table for table in "\n".join(scaling_report.lines(tmp_path)).split("\n\n"))
    assert by_t.splitlines()[0] == "| T (width = 32) | 16 | 32 |" and by_t.count("\n| time | ") == 1
    scaling_report.picture(tmp_path, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
