"""Every public name is in the reference, and everything the reference shows has a docstring."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpfast

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()
REFERENCE = re.findall(r"^::: ([\w.]+)$", PAGE, flags=re.MULTILINE)
MEMBERS = {
    name: set(re.findall(r"\w+", names))
    for name, names in re.findall(r"^::: ([\w.]+)\n    options:\n      members: \[(.*)\]$", PAGE, flags=re.MULTILINE)
}
ELSEWHERE = {  # public, and documented on a page of its own or made by the engine alone
    "DpfastError",  # errors.md, which is made of all of dpfast.errors
    "rules",  # writing-a-rule.md
    "ClippedLoss",
    "ClippedLossTensor",
}
WITHIN = set(re.search(r'"!\^\(([\w|]+)\)\$"', (ROOT / "mkdocs.yml").read_text())[1].split("|"))


def members(thing):
    """(name, what has the docstring) of what the reference shows of a class or module besides its own docstring."""
    if inspect.isclass(thing):
        own = {
            name: value
            for cls in reversed(thing.__mro__)
            if cls.__module__.startswith("dpfast")
            for name, value in vars(cls).items()
        }
        for name, value in own.items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield name, getattr(thing, name)
    elif inspect.ismodule(thing):
        names = getattr(thing, "__all__", [n for n, v in vars(thing).items() if inspect.isfunction(v)])
        yield from ((name, getattr(thing, name)) for name in names)


@pytest.mark.parametrize("name", [*REFERENCE, "dpfast.errors"])
def test_what_the_reference_shows_has_a_docstring(name):
    thing = pkgutil.resolve_name(name)
    assert inspect.getdoc(thing), name
    undocumented = [
        f"{name}.{member}"
        for member, value in members(thing)
        if member in MEMBERS.get(name, {member}) - WITHIN and not member.startswith("_") and not inspect.getdoc(value)
    ]
    assert not undocumented


@pytest.mark.parametrize("module", ["dpfast", "dpfast.opacus"])
def test_every_public_name_is_in_the_reference(module):
    shown = {name.rpartition(".")[2] for name in REFERENCE}
    assert set(importlib.import_module(module).__all__) - ELSEWHERE <= shown


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_names_that_pages_call_by_their_full_name_are_there(page):
    """`dpfast.…` in backquotes, outside of code blocks; operators that torch knows are such names too."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in set(re.findall(r"`(dpfast(?:\.\w+)+)", text)):
        if name.count(".") == 1 and hasattr(torch.ops.dpfast, name.partition(".")[2]):
            continue
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise AssertionError(f"{page.name} speaks of {name}: {error}") from error


@pytest.mark.parametrize("name", ["opacus", "testing"])
def test_a_wing_that_is_asked_for_is_imported(name):
    """As README writes it, behind ``import dpfast`` alone."""
    pytest.importorskip("opacus")
    code = f"import dpfast; assert dpfast.{name}.__name__ == 'dpfast.{name}'"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'opacu'"):
        dpfast.opacu  # noqa: B018
