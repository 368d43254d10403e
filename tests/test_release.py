"""What is handed out: one version, what is declared, and that nothing optional is needed."""

import re
import subprocess
import sys
from pathlib import Path

import dpfast

ROOT = Path(__file__).resolve().parents[1]


def test_the_version_is_the_same_everywhere():
    """It stands in dpfast/__init__.py; what tools cannot read from there is held to it."""
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert newest[1] == cited[1] == dpfast.__version__


def test_the_changelog_has_the_sections_of_keep_a_changelog():
    sections = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_it_trains_without_what_is_optional():
    """As `make dist` does in an empty environment, with what is installed here out of reach."""
    code = """
import runpy, sys
for name in ("opacus", "numpy", "sklearn", "scipy", "transformers", "matplotlib"):
    sys.modules[name] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "tests" / "installed.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "with nothing else installed" in done.stdout
