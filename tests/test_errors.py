"""Every error says where the documentation explains it, and the page is made of the errors' own docstrings."""

import importlib.util
import inspect
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch

import dpfast
from dpfast import errors
from dpfast.testing import check_rule

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


class Scaled(torch.autograd.Function):
    """Which vmap cannot run."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


def without_a_rule():
    dpfast.GradSampleModule(Scale())(torch.randn(3, 4)).sum().backward()


def in_16_bits():
    model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    wrapped(torch.randn(3, 4, dtype=torch.bfloat16)).sum().backward()


def with_batch_norm():
    dpfast.GradSampleModule.validate(torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("runs", "message"),
    [(without_a_rule, "has no rule"), (in_16_bits, "trains parameters in"), (with_batch_norm, "BatchNorm")],
)
def test_a_warning_has_the_line_of_who_called(runs, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs()
    (told,) = [w for w in caught if message in str(w.message)]
    assert issubclass(told.category, errors.DpfastWarning)
    assert told.filename == __file__
    first = runs.__code__.co_firstlineno
    assert first < told.lineno <= first + len(inspect.getsource(runs).splitlines())


def test_who_checks_a_rule_hears_nothing_of_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rule(torch.nn.Linear(4, 2), torch.randn(3, 4))
