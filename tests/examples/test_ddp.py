"""The examples of two processes run with the command that their first lines give."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opacus")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("example", ["ddp.py", "fsdp2.py"])
def test_two_processes_train(tmp_path, example):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / example),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--epochs", "2"], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"epoch (\d): loss ([\d.]+), ε ([\d.]+), ([\d,]+) tokens/s a process", done.stdout)
    assert [line[0] for line in lines] == ["1", "2"]
    assert float(lines[1][1]) < 3.6  # ln 34 letters is 3.5; a step of noise alone leaves it there or above
    assert 0 < float(lines[0][2]) < float(lines[1][2])
