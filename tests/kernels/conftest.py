"""Set-up of the kernels' tests.

Without a GPU the kernels run in Triton's interpreter. A jit function is interpreted or compiled for as long
as its process lives, decided by TRITON_INTERPRET when it is defined, Triton's own library included; so the
variable is set here, before anything in this folder imports Triton, and left set. Ahead-of-time compilation
needs the other kind and runs in processes of its own (`ahead_worker.py`). Where something has imported
Triton as a compiler before this file was read, no test here could run: say so instead of failing each.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    if isinstance(tl.sum, triton.JITFunction):
        raise pytest.UsageError(
            "Triton was imported before TRITON_INTERPRET=1 was set: set it in the environment, "
            "or in a conftest.py that is read earlier"
        )

# The tests are not a package; their shared cases are imported by name.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def none_repeated(monkeypatch):
    """Tests change what a launcher works out, and count what it does; test_repeat.py repeats calls."""
    from dpfast.kernels import _repeat

    monkeypatch.setattr(_repeat, "_DEVICES", set())
