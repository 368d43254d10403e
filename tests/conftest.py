"""Shared set-up of the tests."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# `./kernels` must not be importable as `kernels`: Hugging Face has a package of that name, and the tests
# must see what a user's installation sees, the mapping kernels/ -> dpfast.kernels.
sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != ROOT]

# Without a GPU the kernels run in Triton's interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
