"""The README's picture shows what the most measured machine gave, and nothing that was not measured."""

import pytest
import why_report

MACHINES = ("an old CPU", "a CPU")


def rows():
    found = {}
    for machine, date, ratio in zip(MACHINES, ("2026-01-01", "2026-02-01"), (9.0, 1.5), strict=True):
        found[machine, "mlp", 1, "glibc"] = {
            "plain": {"date": date, "ratio_plain": 1.0, "tensors_mb": 10.0},
            "dpfast one-pass": {"date": date, "ratio_plain": ratio, "tensors_mb": 12.0},
            "opacus hooks": {"date": date, "ratio_plain": 70.0},
            "opacus ghost": {"date": date, "note": "does not fit memory"},
        }
    found["a CPU", "mlp", 2, "glibc"] = {"dpfast one-pass": {"date": "2026-03-01", "ratio_plain": 8.0}}
    found["a CPU", "cnn", 1, "tuned"] = {"dpfast one-pass": {"date": "2026-03-01", "ratio_plain": 7.0}}
    return found


def test_bars_are_the_newest_machines_ratios():
    found = why_report.most_measured(rows())
    assert list(found) == ["mlp"]
    assert why_report.bars(found, why_report.times) == {
        "dpfast one-pass": {"mlp": 1.5},
        "opacus ghost": {},
        "opacus hooks": {"mlp": 70.0},
        "fastDP": {},
    }
    memory = why_report.bars(found, why_report.tensors)
    assert memory.pop("dpfast one-pass") == {"mlp": pytest.approx(1.2)}
    assert not any(memory.values())


def test_a_newer_machine_with_fewer_workloads_does_not_take_the_place():
    found = rows()
    found["a CPU", "cnn", 1, "glibc"] = found["a CPU", "cnn", 1, "tuned"]
    found["a new CPU", "mlp", 1, "glibc"] = {"dpfast one-pass": {"date": "2026-04-01", "ratio_plain": 1.1}}
    assert set(why_report.most_measured(found)) == {"mlp", "cnn"}


def test_it_is_drawn(tmp_path):
    why_report.picture(rows(), tmp_path / "why.png")
    assert (tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")
    why_report.picture({}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_machine_told_to_use_less_stands_back():
    found = rows()
    for machine, used in zip(MACHINES, ("oneDNN AVX-512, MKL AVX2", "oneDNN AVX2, MKL AVX2"), strict=True):
        for row in found[machine, "mlp", 1, "glibc"].values():
            row.update(instructions="AVX-512", used=f"torch AVX2, {used}")
    assert why_report.most_measured(found)["mlp"]["dpfast one-pass"]["ratio_plain"] == 9.0
