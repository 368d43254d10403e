"""python -m dpfast: what each command prints, and how it ends where it cannot do what was asked for."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import dpfast
from dpfast.commands import bench, demo, main, show

FACTORY = """
import torch
from torch import nn

def good():
    model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3))
    return model, torch.randn(4, 6), lambda output: output.square().mean()

def by_name():
    return nn.Bilinear(2, 3, 4), {"input1": torch.ones(5, 2), "input2": torch.ones(5, 3)}

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2)

def fails():
    raise RuntimeError("two\\nlines")

def leaves():
    raise SystemExit(5)

def wrong_input():
    return nn.Linear(2, 2), torch.ones(1, 3)

def wrong():
    return nn.Linear(2, 2)

def no_loss():
    return nn.Linear(2, 2), torch.ones(1, 2), 3.0

nothing = 1
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "of_a_user.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("of_a_user", None)


WRONG = {
    "no-command": ([], "are required"),
    "unknown": (["measure"], "invalid choice"),
    "shape-of-three": (["bench", "--shape", "1,2,3"], "N,T,D,P"),
    "shape-of-words": (["bench", "--shape", "1,2,3,x"], "N,T,D,P"),
    "shape-with-zero": (["bench", "--shape", "1,2,3,0"], "N,T,D,P"),
    "no-shape": (["bench"], "--shape"),
    "no-room": (["bench", "--shape", "1000000000,1000000,1000,1000"], "--shape 1000000000"),
    "dtype": (["bench", "--shape", "1,1,1,1", "--dtype", "int8"], "invalid choice"),
    "no-factory": (["explain"], "package.module:factory"),
    "no-colon": (["explain", "of_a_user"], "must be package.module:factory"),
    "no-module": (["explain", "no_such_module:f"], "No module named 'no_such_module'"),
    "no-function": (["explain", "of_a_user:absent"], "has no 'absent'"),
    "no-callable": (["explain", "of_a_user:nothing"], "not a function"),
    "fails": (["explain", "of_a_user:fails"], "RuntimeError: two lines ("),
    "wrong-input": (["explain", "of_a_user:wrong_input"], "mat1 and mat2"),
    "wrong": (["explain", "of_a_user:wrong"], "returned a Linear, not (model, batch)"),
    "no-loss": (["explain", "of_a_user:no_loss"], "its loss is a float"),
    "frozen": (["explain", "of_a_user:frozen"], "no trainable parameter"),
    "no-folder": (["explain", "of_a_user:good", "--html", "absent/page.html"], "there is no folder absent"),
    "a-folder": (["explain", "of_a_user:good", "--html", "."], "--html . is a folder"),
    "relative": (["explain", "./of_a_user:good"], "'./of_a_user:good' must be package.module:factory"),
    "leaves": (["explain", "of_a_user:leaves"], "SystemExit: 5 ("),
    "a-shape-beyond-numbers": (["bench", "--shape", f"{10**23},1,1,1"], f"--shape {10**23}"),
    "no-cuda": (["bench", "--shape", "1,1,1,1", "--device", "cuda"], "no such device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_done_is_one_line_and_code_2(case, factory, capsys):
    arguments, said = WRONG[case]
    if case == "no-cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    try:
        code = main(arguments)
    except SystemExit as end:  # of argparse
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert len(err.splitlines()) == 1 and err.startswith("python -m dpfast") and said in err


def test_a_page_that_cannot_be_written_is_one_line_too(factory, capsys, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["explain", "of_a_user:good", "--html", str(tmp_path / "page.html")]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "page.html: No space left on device" in err


def test_info_as_json_is_what_info_gives(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dpfast.info()


def test_explain_prints_the_table(factory, capsys):
    assert main(["explain", "of_a_user:good"]) == 0
    out, err = capsys.readouterr()
    assert "rank_one" in out and "without a rule: 1 (PReLU)" in out and not err


def test_explain_as_json(factory, capsys):
    assert main(["explain", "of_a_user:by_name", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == 5
    assert {use["parameter"] for use in found["uses"]} == {"weight", "bias"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("t", [1, 40])
def test_bench_gives_every_verb_and_way_with_a_small_error(t, dtype, capsys):
    assert main(["bench", "--shape", f"4,{t},24,40", "--dtype", dtype, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours = {(row["verb"], row["way"]): row for row in found["rows"] if row["by"].startswith("dpfast")}
    ways = ["rank_one"] if t == 1 else ["direct", "gram"]
    assert ours.keys() == {
        ("outer product", ""),
        ("weighted sum", ""),
        *(("norm", way) for way in ways),
        *(("norm and sum", way) for way in [*ways, "kept"]),
    }
    # In 16 bits peers round what they give; ours is in fp32.
    assert all(row["ms"] > 0 and row["of_limit"] > 0 and row["error"] < 1e-5 for row in ours.values())
    assert sum(row["note"] == "← taken" for row in ours.values()) == 1
    assert {row["by"] for row in found["rows"]} >= {"torch.bmm", "Opacus sampler", "Opacus ghost", "Opacus hooks"}
    assert all(row["error"] < (1e-4 if dtype == "fp32" else 3e-2) for row in found["rows"])


def test_a_row_that_fails_says_why_and_the_others_stay(monkeypatch):
    def no_memory(*_):
        raise RuntimeError("not enough memory: you tried to allocate\nmore")

    monkeypatch.setattr(bench.Bench, "_kept", no_memory)
    rows = bench.Bench(bench.Shape(2, 3, 4, 5), "fp32", "cpu").rows(lambda: None)
    failed = [row for row in rows if row.ms is None]
    assert [row.note for row in failed] == ["not enough memory: you tried to allocate"]
    assert failed[0].cells()[3] == "–" and len(rows) > 8


def test_demo_shows_the_gradient_the_step_and_the_training(monkeypatch, capsys):
    for name, value in {"TRAINED_ON": 256, "BATCH": 16, "STEPS": 2, "ROUNDS": 2, "T": 8, "WIDTH": 16}.items():
        monkeypatch.setattr(demo, name, value)
    assert main(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference"] < 1e-4 and found["epsilon"] > 0 and 0 <= found["accuracy"] <= 1
    assert found["steps"].keys() == {"plain", "dpfast", "Opacus hooks", "Opacus ghost"}
    assert main(["demo"]) == 0
    assert "plain steps" in capsys.readouterr().out


def test_a_table_is_drawn_for_a_terminal_and_plain_elsewhere(monkeypatch, capsys):
    rows = [("norm", "1.5"), (), ("sum", "20.25")]
    show.table(("verb", "ms"), rows, "Title")
    assert capsys.readouterr().out == "Title\nverb     ms\nnorm    1.5\nsum   20.25\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show.table(("verb", "ms"), rows, "Title")
    drawn = capsys.readouterr().out
    assert "─" in drawn and "20.25" in drawn


def test_progress_is_shown_on_a_terminal_after_two_seconds_alone(monkeypatch, capsys):
    with show.progress(3, "work") as done:
        done()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show.progress(3, "work") as done:
        done()
    assert capsys.readouterr().err.strip() == ""
    monkeypatch.setattr(show, "QUIET_FOR", 1e-9)
    with show.progress(3, "work") as done:
        time.sleep(0.2)  # tqdm draws ten times a second at most
        done()
    assert "work" in capsys.readouterr().err


def test_explain_writes_a_page(factory, tmp_path, capsys):
    page = tmp_path / "out.html"
    assert main(["explain", "of_a_user:good", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "rank_one" in out and not err
    assert "1 (PReLU)" in page.read_text() and "plain step" in page.read_text()
