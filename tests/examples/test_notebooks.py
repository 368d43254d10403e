"""Each notebook runs from top to bottom, and what is stored in it is what a run prints, but for its numbers."""

import importlib
import re
from pathlib import Path

import pytest

for name in ("nbclient", "ipykernel", "opacus", "sklearn", "matplotlib"):
    pytest.importorskip(name)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("_notebooks")


def bytes_of_the_budget(printed):
    """They follow from shapes."""
    return re.findall(r"(\d+) bytes a sample", printed)


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [kind for output in outputs for kind in output.get("data", {}) if kind in ("image/png", "text/html")]


@pytest.mark.parametrize("name", ["getting_started", "explain"])
def test_it_runs_and_prints_what_is_stored(notebooks, name):
    stored, found = notebooks.read(name), notebooks.run(name)
    before, now = map(notebooks.printed, (stored, found))
    form = importlib.import_module("_page").form
    assert form(now) == form(before), f"python examples/_notebooks.py {name}"
    assert bytes_of_the_budget(now) == bytes_of_the_budget(before)
    assert pictures(found) == pictures(stored) != []


def test_nothing_of_the_machine_is_stored(notebooks):
    paths = sorted(notebooks.FOLDER.glob("*.ipynb"))
    assert [path.stem for path in paths] == ["explain", "getting_started"]
    for path in paths:
        cells = notebooks.read(path.stem).cells
        assert all(cell.outputs and cell.execution_count for cell in cells if cell.cell_type == "code")
        assert {output.get("name") for cell in cells for output in cell.get("outputs", ())} <= {"stdout", None}
        assert "/site-packages/" not in path.read_text("utf-8")


def test_they_are_linked_from_where_people_look(notebooks):
    for page in ("README.md", "docs/examples.md", "docs/getting-started.md"):
        assert "examples/notebooks" in (ROOT / page).read_text("utf-8"), page
