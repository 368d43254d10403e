"""docs/layers.md: written by the tests that prove its rows.

python -m pytest tests/rules tests/modes/test_models.py --write-table
"""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layers.md"

_INTRODUCTION = """# Layers and models

Written by `python -m pytest tests/rules tests/modes/test_models.py --write-table` from tests that passed; do not edit.

Each layer family is compared with a loop over samples in fp64: per-sample gradients, norms, clipped sums and the
second pass of ghost clipping, each verb of each factor, for N = 0 (where torch itself takes it), 1 and 5 samples.
Largest relative L2 error allowed: 1e-5 in fp32, 1e-11 in fp64 (1e-6 for norms, which are given in fp32), 6e-2 in bf16.

| layer | rule | tested with |
|---|---|---|
"""

_MODELS = """
Models of Hugging Face, tiny and with random weights, unmodified, compared in the same way (fp32: 1e-5):

| model | proved |
|---|---|
"""

_rows: dict[str, tuple[str, str]] = {}
_models: dict[str, list[str]] = {}


def proves(config, family, rule, forms):
    """A test has passed that proves this row."""
    _rows[family] = (rule, "; ".join(forms))


def proves_model(name, what):
    """A test has passed that proves one cell of the models' table."""
    _models.setdefault(name, []).append(what)


def rendered(rows, models):
    lines = [f"| {family} | {rule} | {forms} |" for family, (rule, forms) in rows.items()]
    model_lines = [f"| {name} | {', '.join(what)} |" for name, what in models.items()]
    return _INTRODUCTION + "\n".join(lines) + "\n" + _MODELS + "\n".join(model_lines) + "\n"


def write():
    PAGE.write_text(rendered(_rows, _models))
