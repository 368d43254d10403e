"""What the documentation shows is what happens."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpfast

ROOT = Path(__file__).resolve().parents[1]
MODULES = [m.name for m in pkgutil.walk_packages(dpfast.__path__, "dpfast.") if not m.name.endswith("__main__")]

PAGES = ["README.md"] + [
    f"docs/{name}.md" for name in ("getting-started", "recipes", "explain", "migration", "writing-a-rule")
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    for i, block in enumerate(blocks):
        script = tmp_path / f"block{i}.py"
        script.write_text(block)
        subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path)
