"""The demo runs from beginning to end, and what it says of dpfast is true."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for name in ("opacus", "sklearn", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = ("vision transformer", "MLP")
PRIVATE = ("Opacus hooks", "Opacus ghost", "dpfast", "dpfast, compiled")  # CI has a C++ compiler


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """One run of `digits.py --quick`: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--quick", "--out", "results"]
    done = subprocess.run(
        [*command, "--markdown", "table.md"], cwd=folder, capture_output=True, encoding="utf-8", timeout=600
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def rows_of(folder: Path) -> dict:
    rows = json.loads((folder / "results" / "demo.json").read_text(encoding="utf-8"))["rows"]
    return {(row["model"], row["leg"]): row for row in rows}


def test_table_has_a_line_for_every_leg(quick_run):
    folder, printed = quick_run
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert table in printed
    for model in MODELS:
        for leg in ("plain", *PRIVATE):
            (line,) = [line for line in table.splitlines() if line.startswith(f"| {model} | {leg} |")]
            assert line.count("|") == 9


def test_picture_is_written(quick_run):
    folder, _ = quick_run
    assert (folder / "results" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_clipped_gradient_is_that_of_a_loop_over_samples(quick_run):
    rows = rows_of(quick_run[0])
    for model in MODELS:
        assert rows[model, "plain"]["difference"] is None
        for leg in PRIVATE:
            assert 0 <= rows[model, leg]["difference"] < 1e-4


def test_private_legs_spend_the_budget_and_learn_the_same(quick_run):
    rows = rows_of(quick_run[0])
    for model in MODELS:
        assert rows[model, "plain"]["epsilon"] is None
        for leg in PRIVATE:
            assert 7.5 < rows[model, leg]["epsilon"] <= 8.0
            assert rows[model, leg]["curve_loss"] == pytest.approx(rows[model, "dpfast"]["curve_loss"], rel=1e-2)


def test_step_and_memory_are_measured(quick_run):
    rows = rows_of(quick_run[0])
    for row in rows.values():
        assert row["samples_per_second"] > 0
        assert row["step_ratio"] > 0
    if sys.platform == "linux":  # elsewhere a process cannot know its own peak
        for model in MODELS:
            assert rows[model, "plain"]["memory_mb"] > 0
            assert rows[model, "dpfast"]["memory_mb"] > 0


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digits")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("leg", ["plain", *PRIVATE])
@pytest.mark.parametrize("model_name", MODELS)
def test_an_empty_poisson_batch_adds_noise_only(digits, model_name, leg):
    train_set, _ = digits.digits()
    model, optimizer, backward = digits.build(model_name, leg, sigma=1.0)
    some, empty = train_set[:3], train_set[:0]
    digits.train(model, optimizer, backward, [empty, some, empty])
    before = [p.detach().clone() for p in model.parameters()]
    digits.train(model, optimizer, backward, [empty, some])
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)
