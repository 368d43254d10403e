"""The states of random generators that somebody keeps: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Generator(NamedTuple):
    """How one is asked for its state, and given one."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


def generator(x: Any) -> Generator | None:
    """None of what is none, or has no state, and of those that all share: of these ``same_random_numbers`` knows."""
    numpy: Any = sys.modules.get("numpy")
    if x is torch.default_generator or isinstance(x, random.SystemRandom):
        return None
    if isinstance(x, torch.Generator):
        return Generator(x.get_state, x.set_state)
    if isinstance(x, random.Random):
        return Generator(x.getstate, x.setstate)
    if numpy is None or x is numpy.random.mtrand._rand:
        return None
    if isinstance(x, numpy.random.RandomState):
        return Generator(x.get_state, x.set_state)
    if isinstance(x, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits = getattr(x, "bit_generator", x)
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None
