"""The example of Opacus 0.13's interface runs, and learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opacus")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "opacus_0_13.py"


def test_it_learns(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "DpfastWarning" not in done.stderr, done.stderr
    assert "test accuracy 0.9" in done.stdout
