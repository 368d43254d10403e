"""The example of augmentations runs, a short version, and all ways spend the same ε."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("opacus", "sklearn"):
    pytest.importorskip(name)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "augmentation.py"


def test_every_way_learns_at_the_same_epsilon(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--seeds", "1", "--steps", "25"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"\| (.*) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) % \| .* \|", done.stdout)
    assert [way for way, *_ in rows] == ["no augmentation", "K = 1", "K = 8"]
    assert len({epsilon for _, epsilon, _ in rows}) == 1
    assert 7.9 < float(rows[0][1]) <= 8.0
    assert all(float(accuracy) > 50 for *_, accuracy in rows)  # a guess is right in 10
