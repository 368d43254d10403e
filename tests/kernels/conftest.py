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

import triton.language as tl

_OF_TRITON = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.core.tensor_descriptor_base)
_AS_IMPORTED = [(where, dict(vars(where))) for where in _OF_TRITON]


@pytest.fixture
def compiler():
    """Triton's language as it was imported. The interpreter puts its own functions in the places of the language's, and
    leaves some there where a kernel calls a device function (``InterpretedFunction.__call__``), or where two threads
    run kernels; what is compiled in this process after that fails."""
    for where, names in _AS_IMPORTED:
        for name, value in names.items():
            if vars(where).get(name) is not value:
                setattr(where, name, value)


# The tests are not a package; their shared cases are imported by name.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def none_repeated(monkeypatch):
    """Tests change what a launcher works out, and count what it does; test_repeat.py repeats calls."""
    from dpfast.kernels import _repeat

    monkeypatch.setattr(_repeat, "_DEVICES", set())
