"""Every error says where the documentation explains it, and the page is made of the errors' own docstrings."""

import importlib.util
import pickle
import re
from pathlib import Path

import pytest
import torch

import dpfast
from dpfast import errors

ROOT = Path(__file__).resolve().parents[1]
CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_docstrings_say():
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "docs" / "errors_page.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.page() == PAGE, "python docs/errors_page.py"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_cause_and_a_remedy_on_the_page(cls):
    section = PAGE.partition(f"\n## {cls.__name__}\n")[2].partition("\n## ")[0]
    assert section
    if cls is not errors.DpfastError:  # the base; nothing is raised as it
        assert "**Why:**" in section and "**What to do:**" in section


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, dpfast.DpfastError)])
def test_every_message_names_its_page(cls):
    error = pickle.loads(pickle.dumps(cls("fc: weight of another shape")))
    assert str(error) == f"fc: weight of another shape (docs/errors.md#{cls.__name__.lower()})"
    assert error.args == ("fc: weight of another shape",)
    assert re.search(rf"^## {cls.__name__}$", PAGE, flags=re.MULTILINE)
    assert str(cls("as in docs/units.md")) == "as in docs/units.md"  # a page of its own
    assert str(cls(f"layer 3: {error}")).count("docs/errors.md") == 1
    assert str(cls()) == f"(docs/errors.md#{cls.__name__.lower()})"


def test_pages_that_messages_name_are_there():
    for path in (ROOT / "dpfast").rglob("*.py"):
        for name in re.findall(r"docs/([\w-]+\.md)", path.read_text(encoding="utf-8")):
            assert (ROOT / "docs" / name).exists(), f"{path.name} names docs/{name}"


def test_a_refused_model_says_where_to_read_on():
    with pytest.raises(dpfast.DpfastError, match=r"\(docs/errors\.md#unsupportedmoduleerror\)$"):
        dpfast.GradSampleModuleFastGradientClipping(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
