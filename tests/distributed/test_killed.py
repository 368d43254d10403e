"""A rank dies in the middle of a step: the others end with an error in time, and release nothing."""

import os
import subprocess
import sys

import killed_worker
import pytest
import torch
from killed_worker import SECONDS


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "TP"])
@pytest.mark.parametrize("how", ["is killed", "hangs"])
def test_the_other_rank_raises_and_has_no_gradient(tmp_path, wrapper, how):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    out = tmp_path / "0.pt"
    ranks = [
        subprocess.Popen(
            [sys.executable, killed_worker.__file__, str(rank), str(tmp_path / "store"), str(out), wrapper, how],
            env=env,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    try:
        assert ranks[0].wait(timeout=180) == 0
    finally:
        for rank in ranks:
            rank.kill()
    error, seconds, untouched = torch.load(out)
    assert "Error" in error
    assert seconds < 4 * SECONDS
    assert untouched
    assert all(untouched)
