"""Each example prints what docs/examples.md shows, but for its numbers, and what it says there holds."""

import importlib
import re
from pathlib import Path

import pytest

for name in ("opacus", "sklearn"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("_page")


def numbers(pattern, output):
    found = [float(x.replace(",", "")) for x in re.findall(pattern, output)]
    assert found, pattern
    return found


def learns_digits(output):
    assert min(numbers(r"accuracy ([\d.]+)", output)) > 0.75
    assert 0 < max(numbers(r"ε = ([\d.]+)", output)) <= 8.0


def plain_loop(output):
    learns_digits(output)
    spent = numbers(r"ε = ([\d.]+)", output)
    assert spent == sorted(spent)


def opacus_engine(output):
    learns_digits(output)
    assert numbers(r"differ by ([\d.e+-]+)", output)[0] < 0.05


def per_layer(output):
    learns_digits(output)
    assert set(numbers(r"at most ([\d.]+)", output)) == {1.0}


def users(output):
    learns_digits(output)
    persons, scans = numbers(r"\((\d+) units\)", output)
    assert persons < scans == 1437


def compiled_step(output):
    eager, compiled = re.findall(r"accuracy ([\d.]+) at ε = ([\d.]+)", output)
    assert eager[1] == compiled[1]
    assert abs(float(eager[0]) - float(compiled[0])) < 0.02
    assert float(eager[0]) > 0.75


def characters(output):
    (before, plain), (_, private) = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)
    assert float(plain) < float(private) < 2.6 < float(before)  # 2.9 where it knows how often letters come, and no more


CLAIMS = {
    "plain_loop": plain_loop,
    "opacus_engine": opacus_engine,
    "per_layer": per_layer,
    "users": users,
    "standardised_cnn": learns_digits,
    "compiled_step": compiled_step,
    "characters": characters,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_it_prints_what_the_page_shows(pages, name):
    output = pages.run(name)
    assert pages.form(output) == pages.form((EXAMPLES / "outputs" / f"{name}.txt").read_text(encoding="utf-8"))
    CLAIMS[name](output)


def test_the_page_is_made_of_what_is_kept(pages):
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(), "python examples/_page.py --page"
    assert {path.stem for path in (EXAMPLES / "outputs").iterdir()} == set(pages.COMMANDS)


def test_every_example_is_on_the_page(pages):
    assert {path.stem for path in EXAMPLES.glob("[!_]*.py")} - {"digits"} == set(pages.COMMANDS)
