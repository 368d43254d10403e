"""Shared set-up of the tests."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# `./kernels` must not be importable as `kernels`: Hugging Face has a package of that name, and the tests
# must see what a user's installation sees, the mapping kernels/ -> dpfast.kernels.
sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != ROOT]
