"""What info says of the machine."""

import os
import subprocess
import sys

from dpfast import info


def test_info_command_says_which_backend_and_why():
    out = subprocess.check_output([sys.executable, "-m", "dpfast", "info"], text=True)
    assert "torch" in out
    assert "backend" in out
    assert "because" in out
    assert "oneDNN may use" in out


def test_layers_of_several_pieces_are_among_those_with_a_rule():
    """Recurrent layers and attention have a forward of pieces, not a rule, and are not left to torch.func."""
    assert {"Linear", "LSTM", "GRU", "RNN", "MultiheadAttention"} <= set(info()["layers with a rule"].split(", "))


def test_info_command_says_where_nothing_is_measured_of_the_instructions():
    """Where MKL is told to use what no row is of, torch chooses and FLOPs are counted as they are."""
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    out = subprocess.check_output([sys.executable, "-m", "dpfast", "info"], text=True, env=environment)
    assert "MKL unknown" in out and "torch as it is" in out and "nothing is measured with unknown" in out


def test_broken_triton_means_reference_and_info_says_why(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('broken on purpose')\n")
    code = (
        "import dpfast, torch; print(dpfast.info()['cpu'])\n"
        "print(dpfast.ops.sq_norm(torch.ones(1, 2), torch.ones(1, 2)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert "broken on purpose" in out
    assert "4." in out
